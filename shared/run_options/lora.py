"""Run options for LoRA, named as in TRL's ``ModelConfig``. docs/lora.md explains them."""

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from shared.run_options.section import Section

_RANKS_OF_VLLM = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""An engine is started for a rank in this list, and serves adapters up to that rank."""
_ALL_LINEAR = "all-linear"
_NOT_LAYERS = {
    "lm_head": "the last projection is fused with the loss",
    "embed_out": "the last projection is fused with the loss",
    "embed_tokens": "embeddings are not linear layers",
    "wte": "embeddings are not linear layers",
}


class LoraOptions(Section):
    """Options of training LoRA adapters, which the generator's engine then serves."""

    # LoRA
    use_peft: bool = Field(default=False, description="Train LoRA adapters instead of all weights")
    lora_r: int = Field(default=16, ge=1, le=_RANKS_OF_VLLM[-1], description="Rank of the adapters")
    lora_alpha: int = Field(default=32, ge=1, description="Adapters are scaled by alpha / r")
    use_rslora: bool = Field(
        default=False, description="Scale adapters by alpha / sqrt(r) instead (rsLoRA, arXiv 2312.03732)"
    )
    lora_dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Dropout in front of the adapters in backward passes (0.05 in TRL); its noise is in every ratio",
    )
    lora_target_modules: list[str] | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="Names of the layers that get an adapter; every linear layer if left out",
    )
    load_in_4bit: bool = Field(
        default=False, description="Load the base in 4 bits (QLoRA), in trainer and generator; needs GPUs"
    )

    @field_validator("lora_target_modules", mode="before")
    @classmethod
    def _peft_has_a_name_for_all(cls, value: Any) -> Any:
        return None if value in (_ALL_LINEAR, [_ALL_LINEAR]) else value

    @field_validator("lora_target_modules")
    @classmethod
    def _targets_are_linear_layers(cls, names: list[str] | None) -> list[str] | None:
        for name in names or ():
            if reason := _NOT_LAYERS.get(name.rpartition(".")[2]):
                raise ValueError(f"{name} cannot have an adapter: {reason}; leave it out")
        return names

    @model_validator(mode="after")
    def _lora_options_are_for_lora_runs(self) -> Self:
        if not self.use_peft:
            fields = LoraOptions.model_fields.items()
            for name in (name for name, field in fields if getattr(self, name) != field.default):
                raise ValueError(f"{name} is set, but use_peft is not; set use_peft: true to train LoRA adapters")
        return self


def served_rank(rank: int) -> int:
    """Return the smallest ``max_lora_rank`` of vLLM that serves adapters of this rank."""
    return min(served for served in _RANKS_OF_VLLM if served >= rank)
