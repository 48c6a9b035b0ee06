"""What is set on a transformers model itself, and found in it: attention, recomputation, dropout, layer kernels."""

from typing import Any, cast

import torch
from torch import nn

from services.trainer.policy.varlen_attention import PACKED, register
from shared.errors import UserError
from shared.run_config import RunConfig

_OURS = ("auto", "sdpa")


def run_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype in which the run computes, pushes and exports; what learns is float32 all the same."""
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def attention_name(config: RunConfig, *, device: torch.device) -> str:
    """Return the name in transformers of the attention the run asks for.

    ``auto`` and ``sdpa`` are ours (varlen_attention.py). ``sdpa`` goes row by row; ``auto`` does so on a CPU and in
    float32, and takes torch's flash attention over packed rows on a GPU in bfloat16.

    Raises:
        UserError: There is no such attention on this device.
    """
    name = config.attn_implementation
    if name in _OURS:
        return PACKED
    if name != "eager" and device.type != "cuda":
        raise UserError(f"{name} needs a GPU, and the trainer has none; use auto", field="attn_implementation")
    if name.startswith("flash") and config.dtype != "bfloat16":
        raise UserError(f"{name} computes in bfloat16; set dtype: bfloat16, or use auto", field="attn_implementation")
    return name


def set_attention(lm: Any, name: str) -> str:
    """Have the model attend in this way, and return in which way it did so before.

    Raises:
        UserError: It cannot.
    """
    register()
    before: str = lm.config._attn_implementation  # noqa: SLF001  transformers has no other name for it
    try:
        lm.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise UserError(f"{name} cannot be used with this model: {error}", field="attn_implementation") from error
    return before


def backbone(lm: Any) -> Any:
    """Return the part of the model that ends before the last projection.

    Raises:
        UserError: There is no such part.
    """
    candidates = (lm.base_model, getattr(lm, "model", None))
    found = next((part for part in candidates if part is not None and part is not lm), None)
    if found is None or lm.get_output_embeddings() is None:
        raise UserError(
            f"{type(lm).__name__} does not keep its last projection apart from its layers, so it cannot be trained",
            field="model",
        )
    return found


def turn_dropout_off(lm: Any) -> None:
    """Put every dropout to 0, modules and numbers alike, and the model in evaluation mode."""
    lm.eval()
    for module in cast(nn.Module, lm).modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or (name == "p" and "Dropout" in type(module).__name__)):
                setattr(module, name, 0.0)


def checkpoint_layers(lm: Any) -> None:
    """Have each layer's activations made again by the backward pass, instead of being kept.

    Raises:
        UserError: The model does not know how.
    """
    if not lm.supports_gradient_checkpointing:
        raise UserError(
            f"{type(lm).__name__} cannot recompute its activations; set gradient_checkpointing: false",
            field="gradient_checkpointing",
        )
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Layers recompute in training mode alone. Their children stay in evaluation mode.
    for module in cast(nn.Module, lm).modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def use_liger_kernel(lm: Any, *, device: torch.device) -> None:
    """Replace norms, rotary embeddings and gated layers by Liger-Kernel's. The last projection stays ours.

    Raises:
        UserError: There is no GPU, or no Liger-Kernel.
    """
    if device.type != "cuda":
        raise UserError("use_liger_kernel needs a GPU, and the trainer has none", field="use_liger_kernel")
    from transformers.integrations import liger

    try:
        cast(Any, liger).apply_liger_kernel(lm, {"fused_linear_cross_entropy": False, "cross_entropy": False})
    except ImportError as error:
        raise UserError(
            "use_liger_kernel needs the package liger-kernel in the trainer's environment", field="use_liger_kernel"
        ) from error
