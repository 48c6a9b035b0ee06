"""The policy as a transformers model: loads it, names its tensors as on the hub, saves it.

Trained weights are float32 whatever the run's dtype, because a reinforcement-learning update is often smaller than half
a unit in the last place of bfloat16, and would be lost. Weights are loaded only from safetensors, never from a pickle.
"""

import json
import re
from collections.abc import Container, Iterable, Mapping
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
        revision: Revision on the hub; None for the main branch.
        device: Device that gets the weights.
        dtype: Dtype of the loaded weights, whatever the files have.
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
    """Return the model's tensors, tied tensors once, with the names and shapes of its checkpoint on the hub."""
    return on_hub(policy, unique_tensors(policy))


def on_hub(policy: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors of the model to the names and shapes of its checkpoint on the hub.

    These differ where transformers fuses tensors on loading, for example the experts of a mixture. Tensors on the meta
    device are converted too.
    """
    from transformers import core_model_loading

    renamed: Any = cast(Any, core_model_loading).revert_weight_conversion(policy, tensors)
    return cast(dict[str, Tensor], renamed)


def exact_weights(policy: Any) -> frozenset[str]:
    """Return the names of the weights that are pushed and saved in their own dtype instead of the run's.

    They are the buffers, and the parameters that transformers always keeps in float32. An example is the bias by which
    some routers choose experts: with a rounded bias, vLLM would choose other experts.
    """
    patterns: Iterable[str] = getattr(policy, "_keep_in_fp32_modules_strict", None) or ()
    kept = re.compile("|".join(rf"(^|\.){pattern}(\.|$)" for pattern in patterns) or "(?!)")
    buffers = (name for name, _ in policy.named_buffers())
    return frozenset((*buffers, *(name for name, _ in policy.named_parameters() if kept.search(name))))


def dtype_of(name: str, own: torch.dtype, *, run: torch.dtype, exact: Container[str]) -> torch.dtype:
    """Return the dtype in which a weight is pushed and saved.

    Args:
        name: The weight's name in the model.
        own: The weight's dtype in the model.
        run: The run's dtype.
        exact: The names that `exact_weights` returned.
    """
    return run if own.is_floating_point and name not in exact else own


def in_dtype(policy: Any, run: torch.dtype) -> dict[str, Tensor]:
    """Return meta tensors with the names and shapes of the weights, in the dtypes in which they are saved."""
    exact = exact_weights(policy)
    return {
        name: torch.empty(tensor.shape, dtype=dtype_of(name, tensor.dtype, run=run, exact=exact), device="meta")
        for name, tensor in unique_tensors(policy).items()
    }


def save_policy(policy: Any, directory: Path, *, dtype: torch.dtype) -> None:
    """Write the model to a directory that ``from_pretrained`` loads, in ``dtype`` except for `exact_weights`.

    Raises:
        OSError: The directory could not be written.
    """
    wanted = in_dtype(policy, dtype)
    tensors = {name: tensor.to(wanted[name].dtype) for name, tensor in unique_tensors(policy).items()}
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
    """Write the files that are needed beside weights to load them: the configs and, if given, the tokenizer.

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
