"""Options about the trainer's computation: optimizer, memory, devices."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from shared.run_options.lr_schedule import REFUSED_TYPES, KwargValue, LrSchedule, LrSchedulerType
from shared.run_options.section import LARGEST, Positive, Section

Attention = Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]

Optimizer = Literal["adamw_torch_fused", "adamw_torch", "sgd", "rmsprop", "adagrad"]
NUM_MOMENTS: Final[Mapping[Optimizer, int]] = {
    "adamw_torch_fused": 2,
    "adamw_torch": 2,
    "sgd": 0,
    "rmsprop": 1,
    "adagrad": 1,
}
"""Tensors of a parameter's shape that an optimizer keeps for it."""
_OF_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")


class TrainingOptions(Section):
    """Options of the trainer's policy_core.py."""

    max_steps: int = Field(
        default=-1, ge=-1, description="Optimizer steps; -1 derives them from num_train_epochs, 0 only evaluates"
    )
    num_train_epochs: float = Field(default=3.0, gt=0)
    learning_rate: Positive = Field(default=1e-6)
    lr_scheduler_type: LrSchedulerType = Field(default="linear", description="As in transformers")
    lr_scheduler_kwargs: dict[str, KwargValue] | None = Field(
        default=None, description="Options of the schedule, as in transformers (num_cycles, min_lr_rate, ...)"
    )
    warmup_steps: int | float = Field(
        default=0, ge=0, description="Optimizer steps; below 1, a share of the run's steps"
    )
    optim: Optimizer = Field(
        default="adamw_torch_fused", description="As in transformers: torch's optimizer of that name"
    )
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_epsilon: Positive = Field(default=1e-8)
    max_grad_norm: float = Field(default=1.0, ge=0, description="0 turns clipping off")

    # Memory and speed
    max_tokens_per_microbatch: int = Field(default=16384, ge=1, description="Most tokens in one forward pass of a rank")
    packing: bool = Field(default=True, description="Put several rollouts into one sequence, without padding")
    gradient_checkpointing: bool | Literal["auto"] = Field(
        default="auto",
        description="Recompute activations instead of keeping them; auto keeps them on a CPU, if they are small",
    )
    attn_implementation: Attention = Field(default="auto", description="As in transformers; auto chooses")
    cast_lm_head_to_fp32: bool = Field(
        default=False, description="Compute the last projection in float32 for any dtype"
    )
    use_liger_kernel: bool = Field(default=False, description="Liger-Kernel's layers; needs a GPU")

    # Ranks
    nproc_per_node: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="Training ranks on each machine; auto is one per GPU"
    )
    nnodes: int = Field(default=1, ge=1, description="Number of machines for the training ranks")
    fsdp_reshard_after_forward: bool = Field(
        default=True, description="Gather a layer's weights again in the backward pass instead of keeping them"
    )

    @model_validator(mode="after")
    def _options_of_adam_are_for_adam(self) -> Self:
        if not self.optim.startswith("adamw"):
            fields = TrainingOptions.model_fields
            for name in (name for name in _OF_ADAM if getattr(self, name) != fields[name].default):
                raise ValueError(f"{name} would change nothing: optim {self.optim} does not use it")
        return self

    @field_validator("lr_scheduler_type", mode="before")
    @classmethod
    def _some_schedules_make_no_sense_here(cls, value: Any) -> Any:
        if isinstance(value, str) and value in REFUSED_TYPES:
            raise ValueError(f"{value} {REFUSED_TYPES[value]}")
        return value

    @field_validator("lr_scheduler_kwargs", mode="before")
    @classmethod
    def _options_of_the_schedule_are_numbers_and_words(cls, value: Any) -> Any:
        options = cast("dict[object, object]", value) if isinstance(value, dict) else {}
        for name, given in options.items():
            if isinstance(given, int) and abs(given) > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST}")
            is_number = isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)
            if not is_number and not isinstance(given, str):
                raise ValueError(f"{name} must be a number or a word")
        return cast("object", value)

    @model_validator(mode="after")
    def _the_schedule_is_known_and_fits(self) -> Self:
        schedule = self.lr_schedule()
        schedule.check()
        if self.max_steps > 0 and (misfit := schedule.misfit(self.max_steps, run=f"max_steps={self.max_steps}")):
            raise ValueError(misfit[1])
        return self

    def lr_schedule(self) -> LrSchedule:
        """Return the learning-rate schedule."""
        return LrSchedule(self.lr_scheduler_type, self.lr_scheduler_kwargs or {}, self.learning_rate, self.warmup_steps)
