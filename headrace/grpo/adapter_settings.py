"""Translates ``peft_config`` and ``quantization_config`` to the settings of a run."""

from dataclasses import fields
from typing import Any

from headrace.grpo.argument_error import ArgumentError

_LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters",
}
_WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "fan_in_fan_out", "runtime_config", "ensure_weight_tying"),
    }
)
"""Options of a ``LoraConfig`` that PEFT fills in, or that do not change what an adapter of linear layers computes."""


def adapter_settings(config: Any, bits: Any) -> dict[str, Any]:
    """Return the run settings of a LoRA adapter and of 4-bit weights. They are empty if both arguments are None.

    Args:
        config: The ``peft_config``, a ``LoraConfig``; None without an adapter.
        bits: The ``quantization_config``, a ``BitsAndBytesConfig`` with 4 bits; None without quantization.

    Raises:
        ArgumentError: The adapter is not LoRA, the quantization is not 4 bits, or an option is not supported.
    """
    found: dict[str, Any] = {"load_in_4bit": True} if getattr(bits, "load_in_4bit", False) else {}
    if bits is not None and not found:
        raise ArgumentError("quantization_config: only 4 bits are supported: BitsAndBytesConfig(load_in_4bit=True)")
    if config is None:
        return found
    if type(config).__name__ != "LoraConfig":
        raise ArgumentError(
            f"peft_config is a {type(config).__name__}, but only LoRA is trained here: give a LoraConfig"
        )
    targets, default = config.target_modules, type(config)()
    known = {*_LORA, *_WITHOUT_EFFECT, "target_modules"}
    unknown = [it.name for it in fields(config) if getattr(config, it.name) != getattr(default, it.name)]
    if unknown := [name for name in unknown if name not in known]:
        raise ArgumentError(
            f"peft_config has {', '.join(unknown)}, which a run does not have; leave it out, or train all weights "
            "without peft_config"
        )
    found["lora_dropout"] = config.lora_dropout  # 0 in PEFT, and 0.05 in TRL's ModelConfig
    found |= {ours: getattr(config, theirs) for theirs, ours in _LORA.items() if getattr(config, theirs, None)}
    found |= {"lora_target_modules": targets if isinstance(targets, str) else sorted(targets)} if targets else {}
    return {"use_peft": True, **found}


def about_quantization(bits: Any) -> list[str]:
    """Return a note in a list if 4 bits are not nf4 with double quantization, as in every run; else an empty list."""
    kind = getattr(bits, "bnb_4bit_quant_type", "nf4")
    is_double = getattr(bits, "bnb_4bit_use_double_quant", True)
    if kind == "nf4" and is_double:
        return []
    given = f"{kind} {'with' if is_double else 'without'}"
    return [f"quantization_config: 4 bits are nf4 with double quantization (given: {given})"]
