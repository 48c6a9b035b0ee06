"""How the trainer computes: optimizer, memory, devices."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from shared.run_options.section import Positive, Section

Attention = Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]


class TrainingOptions(Section):
    """Options of policy_core.py of the trainer."""

    max_steps: int = Field(default=-1, ge=-1, description="Optimizer steps; -1 derives them from num_train_epochs")
    num_train_epochs: float = Field(default=3.0, gt=0)
    learning_rate: Positive = Field(default=1e-6)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = Field(default="linear")
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_epsilon: Positive = Field(default=1e-8)
    max_grad_norm: float = Field(default=1.0, ge=0, description="0 turns clipping off")

    # Memory and speed
    max_tokens_per_microbatch: int = Field(default=16384, ge=1, description="Tokens in one forward pass of one rank")
    packing: bool = Field(default=True, description="Several rollouts in one sequence, without padding")
    gradient_checkpointing: bool = Field(default=True, description="Recompute activations instead of keeping them")
    attn_implementation: Attention = Field(default="auto", description="As in transformers; auto chooses")
    cast_lm_head_to_fp32: bool = Field(default=False, description="The last projection in float32 whatever the dtype")
    use_liger_kernel: bool = Field(default=False, description="Liger-Kernel's layers; needs a GPU")

    # Ranks
    nproc_per_node: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="Training ranks on each machine; auto is one a GPU"
    )
    nnodes: int = Field(default=1, ge=1, description="Machines the training ranks are on")
    fsdp_reshard_after_forward: bool = Field(
        default=True, description="Gather a layer's weights again in the backward pass instead of keeping them"
    )

    @model_validator(mode="after")
    def _steps_make_sense(self) -> Self:
        if self.max_steps == 0:
            raise ValueError("max_steps=0 trains nothing; use -1 to derive it from num_train_epochs")
        if 0 < self.max_steps < self.warmup_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} is longer than max_steps={self.max_steps}: "
                "the learning rate would never reach learning_rate"
            )
        return self
