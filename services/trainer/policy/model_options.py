"""Options of a transformers model: attention, activation recomputation, dropout, layer kernels."""

import math
from typing import Any, cast

import torch
from torch import nn

from services.trainer.policy.varlen_attention import PACKED, register
from shared.errors import UserError
from shared.install_commands import install_packages
from shared.run_options.run_config import RunConfig

_OURS = ("auto", "sdpa")

_MOST_KEPT_BYTES = 2 << 30


def run_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype in which the run computes, pushes and exports. Trained weights are always float32."""
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def attention_name(config: RunConfig, *, device: torch.device) -> str:
    """Return transformers' name for the attention that the run asks for.

    ``auto`` and ``sdpa`` are implemented in varlen_attention.py. ``sdpa`` computes row by row. ``auto`` uses torch's
    flash attention over packed rows in bfloat16 on a GPU that has it, and otherwise computes row by row.

    Raises:
        UserError: This device or dtype does not support that attention.
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
    """Make the model use this attention, and return the name of the one it used before.

    Raises:
        UserError: The model cannot use it.
    """
    register()
    before: str = lm.config._attn_implementation  # noqa: SLF001  transformers has no other name for it
    try:
        lm.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise UserError(f"{name} cannot be used with this model: {error}", field="attn_implementation") from error
    return before


def backbone(lm: Any) -> Any:
    """Return the part of the model before the last projection.

    Raises:
        UserError: The model has no such part.
    """
    candidates = (lm.base_model, getattr(lm, "model", None))
    found = next((part for part in candidates if part is not None and part is not lm), None)
    if found is None or lm.get_output_embeddings() is None:
        raise UserError(
            f"{type(lm).__name__} does not separate its last projection from its layers, so it cannot be trained",
            field="model",
        )
    return found


def turn_dropout_off(lm: Any) -> None:
    """Set every dropout rate to 0, in dropout modules and in attributes, and put the model in evaluation mode."""
    lm.eval()
    for module in cast(nn.Module, lm).modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or (name == "p" and "Dropout" in type(module).__name__)):
                setattr(module, name, 0.0)


def recomputes(lm: Any, config: RunConfig, *, is_alone: bool, device: torch.device) -> bool:
    """Return whether the backward pass recomputes activations instead of keeping them.

    With ``auto``, activations are kept if the model cannot recompute them, or if this is the only rank, on a CPU, and
    they take at most 2 GiB. Several ranks must agree, because sharded layers are gathered again to be recomputed.
    """
    if config.gradient_checkpointing != "auto":
        return config.gradient_checkpointing
    are_small = is_alone and device.type == "cpu" and activation_bytes(lm, config) <= _MOST_KEPT_BYTES
    return bool(lm.supports_gradient_checkpointing) and not are_small


def activation_bytes(lm: Any, config: RunConfig) -> float:
    """Estimate the bytes of activations that the largest pass keeps for its backward pass, without recomputation.

    Returns infinity if the model's sizes cannot be read, or if its attention keeps scores (varlen_attention.py).

    A decoder layer keeps about 8 vectors of its hidden size for a token (norms and residuals), 8 of its attention's and
    5 of its intermediate size, all counted as float32. torch's attention kernel for a CPU keeps no scores.
    """
    try:
        sizes = lm.config.get_text_config()
        hidden, heads, layers = (
            int(getattr(sizes, name)) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        attention = heads * int(getattr(sizes, "head_dim", None) or hidden // heads)
        intermediate = max(
            int(getattr(sizes, "intermediate_size", None) or 4 * hidden),
            int(getattr(sizes, "moe_intermediate_size", None) or 0)
            * int(getattr(sizes, "num_experts_per_tok", None) or 1),
        )
        has_capped_scores = getattr(sizes, "attn_logit_softcapping", None) is not None
    except (AttributeError, RuntimeError, TypeError, ValueError):  # some sizes differ between layers
        return math.inf
    has_sinks = any(name.endswith("sinks") for name, _ in lm.named_parameters())
    if has_capped_scores or has_sinks or config.attn_implementation not in _OURS:
        return math.inf
    vectors = 8 * hidden + 8 * attention + 5 * intermediate
    return 4.0 * layers * config.max_tokens_per_microbatch * vectors


def checkpoint_layers(lm: Any) -> None:
    """Make the backward pass recompute each layer's activations instead of storing them.

    Raises:
        UserError: The model does not support it.
    """
    if not lm.supports_gradient_checkpointing:
        raise UserError(
            f"{type(lm).__name__} cannot recompute its activations; set gradient_checkpointing: false",
            field="gradient_checkpointing",
        )
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Layers recompute only in training mode. Their children stay in evaluation mode.
    for module in cast(nn.Module, lm).modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def use_liger_kernel(lm: Any, *, device: torch.device) -> None:
    """Replace norms, rotary embeddings and gated layers with Liger-Kernel's. The last projection is not replaced.

    Raises:
        UserError: The device is not a GPU, or Liger-Kernel is not installed.
    """
    if device.type != "cuda":
        raise UserError("use_liger_kernel needs a GPU, and the trainer has none", field="use_liger_kernel")
    from transformers.integrations import liger

    try:
        cast(Any, liger).apply_liger_kernel(lm, {"fused_linear_cross_entropy": False, "cross_entropy": False})
    except ImportError as error:
        raise UserError(
            f"use_liger_kernel needs liger-kernel; install it with {install_packages('liger-kernel')}",
            field="use_liger_kernel",
        ) from error
