"""Run options for the trainer's computation: optimizer, memory, devices."""

import math
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from shared.run_options.lr_schedule import REFUSED_TYPES, KwargValue, LrSchedule, LrSchedulerType
from shared.run_options.optimizers import ADAM_OPTIONS, FACTS, OptimArgument, Optimizer, moment_bytes, parse_optim_args
from shared.run_options.section import LARGEST, Positive, Section

CompileMode = Literal["default", "max-autotune-no-cudagraphs"]
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
INDUCTOR = "inductor"

Attention = Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]


class TrainingOptions(Section):
    """Options of the optimizer, its schedule, memory and speed, and the training ranks."""

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
        default="adamw_torch_fused",
        description="As in transformers, and torch's Muon; from adamw_8bit on with the extra `trainer-8bit`",
    )
    optim_args: str | None = Field(
        default=None, max_length=1000, description="Arguments of the optimizer, such as `momentum=0.9,nesterov=true`"
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
    torch_compile: bool = Field(default=False, description="Compile the model's layers with torch.compile")
    torch_compile_backend: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="Backend of torch.compile, such as `aot_eager`; `inductor` if left out"
    )
    torch_compile_mode: CompileMode | None = Field(default=None, description="Mode of the backend `inductor`")

    # Ranks
    nproc_per_node: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="Training ranks on each machine; auto is one per GPU"
    )
    nnodes: int = Field(default=1, ge=1, description="Number of machines for the training ranks")
    fsdp_reshard_after_forward: bool = Field(
        default=True, description="Gather a layer's weights again in the backward pass instead of keeping them"
    )

    @model_validator(mode="after")
    def _options_of_adam_are_for_optimizers_that_use_them(self) -> Self:
        fields = TrainingOptions.model_fields
        unused = [name for name in ADAM_OPTIONS if name not in FACTS[self.optim].adam_options]
        for name in (name for name in unused if getattr(self, name) != fields[name].default):
            raise ValueError(f"{name} would change nothing: optim {self.optim} does not use it")
        return self

    @model_validator(mode="after")
    def _the_optimizer_takes_its_arguments(self) -> Self:
        try:
            arguments = self.optimizer_arguments()
        except ValueError as error:
            raise ValueError(f"optim_args: {error}") from error
        if arguments.get("nesterov") and self.optim == "sgd":
            if not arguments.get("momentum"):
                raise ValueError("optim_args: nesterov needs momentum; give momentum=0.9 too")
            if arguments.get("dampening"):
                raise ValueError("optim_args: nesterov needs a dampening of 0; leave dampening out")
        return self

    @model_validator(mode="after")
    def _the_optimizers_state_is_shared_or_on_one_rank(self) -> Self:
        why = FACTS[self.optim].why_one_rank
        if why and (self.nnodes > 1 or self.nproc_per_node not in ("auto", 1)):
            raise ValueError(
                f"optim: {self.optim} trains on one rank: {why}. Set nproc_per_node: 1 and nnodes: 1, or another optim"
            )
        return self

    @field_validator("torch_compile_mode", mode="before")
    @classmethod
    def _a_graph_of_the_gpu_has_fixed_sizes(cls, value: Any) -> Any:
        if value in CUDA_GRAPH_MODES:
            raise ValueError(
                f"{value} records CUDA graphs, which have fixed sizes, and each pass has another number of tokens; use "
                "max-autotune-no-cudagraphs, or leave it out"
            )
        return value

    @model_validator(mode="after")
    def _options_of_the_compiler_have_an_effect(self) -> Self:
        for name in ("torch_compile_backend", "torch_compile_mode"):
            if not self.torch_compile and getattr(self, name) is not None:
                raise ValueError(f"{name} is set, but torch_compile is not; set torch_compile: true to compile")
        if self.torch_compile_mode is not None and self.compile_backend != INDUCTOR:
            raise ValueError("torch_compile_mode is a mode of the backend inductor; leave it out")
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
        """Return the learning-rate schedule, with its kwargs, learning rate and warm-up."""
        return LrSchedule(self.lr_scheduler_type, self.lr_scheduler_kwargs or {}, self.learning_rate, self.warmup_steps)

    @property
    def compile_backend(self) -> str:
        """The backend of torch.compile; ``inductor`` if none was chosen."""
        return self.torch_compile_backend or INDUCTOR

    def optimizer_arguments(self) -> dict[str, OptimArgument]:
        """Return ``optim_args`` as a dict; empty if they are not set. Raises ValueError if they are wrong."""
        return parse_optim_args(self.optim, self.optim_args) if self.optim_args else {}

    def moment_bytes(self) -> int:
        """Return the bytes of the optimizer's state for each trained parameter."""
        return moment_bytes(self.optim, self.optimizer_arguments())
