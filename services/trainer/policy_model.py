"""The policy as a transformers model: loaded, named as on the hub, saved.

The seam to transformers: everything of it that the trainer's core touches, but the forward pass, is here. Weights are
float32 whatever the dtype of the run: a reinforcement-learning update is often smaller than half a unit in the last
place of bfloat16, and would be lost. Weights come from safetensors alone, never from a pickle.
"""

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from services.trainer.prompt_encoder import refuse_own_code, unreadable
from shared.errors import UserError


def load_policy(model: str, *, revision: str | None, device: torch.device) -> Any:
    """Return a causal language model with float32 weights and every dropout off.

    Dropout would make trainer and generator disagree on the very same weights, and the importance ratio measure noise.

    Raises:
        UserError: There is no such model, it is incomplete, or it comes with code of its own.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    refuse_own_code(model, revision)
    try:
        loaded: Any = cast(Any, AutoModelForCausalLM).from_pretrained(
            model,
            revision=revision,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except unreadable() as error:
        raise UserError(f"the model {model!r} could not be loaded: {error}", field="model") from error
    policy, info = loaded
    absent: list[str] = sorted(info["missing_keys"])
    if absent:
        raise UserError(
            f"the weight files of {model!r} lack {len(absent)} of the model's parameters, first of all {absent[0]}; "
            "they would have been made up at random",
            field="model",
        )
    policy.eval()
    return policy.to(device)


def unique_tensors(policy: Any) -> dict[str, Tensor]:
    """Return every tensor of the model's state, detached and in fixed order; tied ones once, under the first name."""
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in policy.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() == 0 or place not in seen:
            seen.add(place)
            tensors[name] = tensor.detach()
    return tensors


def hub_tensors(policy: Any) -> dict[str, Tensor]:
    """Return `unique_tensors` under the names, and in the shapes, that checkpoints on the hub have.

    They differ where transformers fuses tensors on loading, as it does with the experts of a mixture.
    """
    from transformers import core_model_loading

    tensors: Any = cast(Any, core_model_loading).revert_weight_conversion(policy, unique_tensors(policy))
    return cast(dict[str, Tensor], tensors)


def save_policy(policy: Any, tokenizer: Any | None, directory: Path, *, dtype: torch.dtype) -> None:
    """Write a directory that ``from_pretrained`` loads, with weights in ``dtype``.

    Raises:
        OSError: It could not be written.
    """
    from safetensors import SafetensorError

    tensors = {name: _in_dtype(tensor, dtype) for name, tensor in unique_tensors(policy).items()}
    try:
        policy.save_pretrained(directory, state_dict=tensors)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    if dtype != torch.float32:
        config_file = directory / "config.json"
        config = json.loads(config_file.read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        config_file.write_text(json.dumps(config, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
