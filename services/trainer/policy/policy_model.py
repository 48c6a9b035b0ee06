"""The policy as a transformers model: loads it, names its tensors as on the hub, saves it.

The seam to transformers: apart from the forward pass, the core touches transformers only here. Trained weights are
float32 whatever the run's dtype, because a reinforcement-learning update is often smaller than half a unit in the last
place of bfloat16, and would be lost. Weights are loaded only from safetensors, never from a pickle.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from services.trainer.data.prompt_encoder import refuse_own_code, unreadable
from shared.errors import UserError


def load_policy(
    model: str,
    *,
    revision: str | None,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    quantization: Any | None = None,
) -> Any:
    """Return a causal language model in evaluation mode.

    Args:
        model: Directory or hub id.
        revision: Revision on the hub.
        device: Device to load to.
        dtype: Dtype of the weights.
        quantization: transformers' quantisation config, for a frozen base (run_models.py).

    Raises:
        UserError: The model does not exist, is incomplete, or needs code from its repository.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    refuse_own_code(model, revision)
    placed: dict[str, Any] = {}
    if quantization is not None:
        placed = {"quantization_config": quantization, "device_map": {"": device}}
    try:
        loaded: Any = cast(Any, AutoModelForCausalLM).from_pretrained(
            model,
            revision=revision,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **placed,
        )
    except unreadable() as error:
        raise UserError(f"the model {model!r} could not be loaded: {error}", field="model") from error
    policy, info = loaded
    absent: list[str] = sorted(info["missing_keys"])
    if absent:
        raise UserError(
            f"the weight files of {model!r} lack {len(absent)} of the model's parameters, such as {absent[0]}; "
            "they would be initialised at random",
            field="model",
        )
    policy.eval()
    return policy if placed else policy.to(device)


def unique_tensors(policy: Any) -> dict[str, Tensor]:
    """Return every tensor of the model's state, detached and in fixed order. Tied tensors appear once, by first name.

    These are the live tensors; sharded tensors are DTensors.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in policy.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def hub_tensors(policy: Any) -> dict[str, Tensor]:
    """Return `unique_tensors` with the names and shapes of checkpoints on the hub.

    These differ where transformers fuses tensors on loading, as it does for the experts of a mixture.
    """
    from transformers import core_model_loading

    tensors: Any = cast(Any, core_model_loading).revert_weight_conversion(policy, unique_tensors(policy))
    return cast(dict[str, Tensor], tensors)


def dtype_of(policy: Any, name: str, own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a weight is pushed and saved.

    It is float32 where transformers always keeps float32, such as the bias by which some routers choose experts: after
    rounding, vLLM would choose others.

    Args:
        policy: The model.
        name: The weight's name, in the model or on the hub.
        own: The weight's own dtype, which integers keep.
        dtype: The run's dtype.
    """
    if not own.is_floating_point:
        return own
    exact: Iterable[str] = getattr(policy, "_keep_in_fp32_modules_strict", None) or ()
    return torch.float32 if any(re.search(rf"(^|\.){part}(\.|$)", name) for part in exact) else dtype


def save_policy(policy: Any, directory: Path, *, dtype: torch.dtype) -> None:
    """Write a directory that ``from_pretrained`` loads, with the model's own weights in ``dtype``.

    Raises:
        OSError: The directory could not be written.
    """
    own = unique_tensors(policy).items()
    tensors = {name: tensor.to(dtype_of(policy, name, tensor.dtype, dtype)) for name, tensor in own}
    save_tensors(policy, tensors, directory)
    if dtype != torch.float32:
        config_file = directory / "config.json"
        config = json.loads(config_file.read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        config_file.write_text(json.dumps(config, indent=2) + "\n")


def save_tensors(policy: Any, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write a directory that ``from_pretrained`` loads: config, generation config, and weights named as on the hub.

    Args:
        policy: The model that the weights belong to. Its own weights are ignored, and may be on the meta device.
        tensors: Every whole weight in the dtype to write, by its name in the model's state.
        directory: Created if it does not exist.

    Raises:
        OSError: The directory could not be written.
    """
    from safetensors import SafetensorError
    from transformers import GenerationConfig

    own = getattr(policy, "generation_config", None)
    policy.generation_config = GenerationConfig()  # a default, which transformers saves; see _save_generation_config
    try:
        policy.save_pretrained(directory, state_dict=dict(tensors))
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        policy.generation_config = own
    _save_generation_config(policy, directory)


def save_description(policy: Any, tokenizer: Any | None, directory: Path) -> None:
    """Write the files that make float32 weights loadable: config, generation config, tokenizer.

    Raises:
        OSError: A file could not be written.
    """
    policy.config.save_pretrained(directory)
    _save_generation_config(policy, directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def _save_generation_config(policy: Any, directory: Path) -> None:
    """Write the model's generation config unchanged, as ``GenerationConfig.save_pretrained`` does after its checks.

    transformers loads contradictory settings with a warning, but refuses to save them. Many models on the hub have
    such settings, and neither a checkpoint nor an export may fail because of them.
    """
    if policy.can_generate():
        file = directory / "generation_config.json"
        policy.generation_config.to_json_file(file, use_diff=True, keys_to_pop=["compile_config"])
