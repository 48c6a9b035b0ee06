"""Exports a LoRA run's checkpoint as a loadable directory: PEFT adapters, or the base model with the adapters merged.

model/shard-*  --assembled, in the run's dtype------>  DIR/adapter_model.safetensors      PEFT, vLLM --lora-modules
               --W + alpha / r * B A, in float32-->    DIR/model.safetensors              like any other model
"""

import json
import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from services.trainer.checkpoints.core_state import STATE_FILE
from services.trainer.checkpoints.shards import read_shards, saved_shapes
from services.trainer.policy.lora import BASE_HASH, CONFIG_FILE, fingerprint, write_adapters
from services.trainer.policy.policy_model import load_policy, save_policy
from shared.errors import UserError


def holds_adapters(model: Path) -> bool:
    """Whether a model directory contains LoRA adapters instead of a whole model."""
    return (model / CONFIG_FILE).is_file()


def export_adapters(source: Path, directory: Path, *, dtype: torch.dtype) -> None:
    """Write the adapters in ``source``, a checkpoint's model directory, to ``directory`` in PEFT's format.

    Raises:
        OSError: The adapters could not be written.
    """
    write_adapters({name: tensor.to(dtype) for name, tensor in _read(source).items()}, directory)
    (directory / CONFIG_FILE).write_bytes((source / CONFIG_FILE).read_bytes())


@torch.no_grad()
def export_merged(source: Path, directory: Path, *, dtype: torch.dtype) -> None:
    """Merge the adapters in ``source`` into their base model, and write that model to ``directory``.

    Raises:
        UserError: The base model is missing, or is not the one that the adapters were trained with.
        OSError: The directory could not be written.
    """
    described: dict[str, Any] = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    base = str(described["base_model_name_or_path"])
    lm = load_policy(base, revision=described.get("revision"), device=torch.device("cpu"))
    numbers: dict[str, Any] = json.loads((source.parent / STATE_FILE).read_text(encoding="utf-8"))
    if numbers.get(BASE_HASH, found := fingerprint(lm)) != found:
        raise UserError(
            f"{base} does not have the weights that the adapters were trained with: they have changed since, or were "
            "in 4 bits. Restore them, or export the adapters without --merge"
        )
    weights = dict(cast(torch.nn.Module, lm).named_parameters())
    rank = int(described["r"])
    factor = float(described["lora_alpha"]) / (math.sqrt(rank) if described.get("use_rslora") else rank)
    adapters = _read(source)
    for name in sorted(name for name in adapters if name.endswith(".lora_A.weight")):
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = adapters[name], adapters[name.replace(".lora_A.", ".lora_B.")]
        weight = weights.get(f"{layer}.weight")
        if weight is None or weight.shape != (b.shape[0], a.shape[1]):
            raise UserError(
                f"{base} has no layer {layer} of the adapters' size; it is not the model that the run started from"
            )
        weight.add_(b @ a, alpha=factor)
    save_policy(lm, directory, dtype=dtype)


def _read(source: Path) -> dict[str, Tensor]:
    tensors = {name: torch.empty(shape) for name, shape in saved_shapes(source).items()}
    read_shards(source, tensors)
    return tensors
