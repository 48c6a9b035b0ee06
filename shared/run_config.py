"""What a user submits: one run. Names are TRL's ``GRPOConfig`` wherever the meaning is the same.

Validated once, by the run API, before anything starts; then stored in Redis and read by every service. Unknown keys are
refused, and combinations that make no sense are refused with the reason.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shared.errors import UserError

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class RunConfig(BaseModel):
    """One GRPO run. Every field but ``model``, ``dataset_name`` and ``reward_funcs`` has a default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    # What is trained on what
    name: str | None = Field(default=None, description="For people; the run id is made by the API")
    model: str = Field(description="Directory or Hugging Face id of a causal language model")
    model_revision: str | None = Field(default=None, description="Git revision of a hub model")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Of trainer and generator")
    dataset_name: str = Field(description="Path of a .jsonl or .parquet file, or a Hugging Face dataset id")
    dataset_config: str | None = Field(default=None, description="Configuration of a hub data set")
    dataset_train_split: str = Field(default="train", description="Split of a hub data set")
    prompt_column: str = Field(default="prompt", description="Column with the text or the messages")
    shuffle_dataset: bool = Field(default=True, description="Anew in each epoch")
    seed: int = Field(default=42, ge=0, description="Of the shuffling and of the trainer")

    # Rewards
    reward_funcs: list[str] = Field(
        min_length=1, description="Built-in names or 'package.module:function', with TRL's signature"
    )
    reward_weights: list[float] | None = Field(default=None, description="One a function; all 1.0 if left out")
    reward_timeout_s: Positive = Field(default=30.0, description="Deadline of one function for one group")

    # Generation
    num_generations: int = Field(default=8, ge=2, le=1024, description="Completions a prompt")
    max_completion_length: int = Field(default=256, ge=1, description="Tokens")
    max_prompt_length: int | None = Field(default=None, ge=1, description="Longer prompts are dropped, counted")
    temperature: float = Field(default=1.0, gt=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0 is off")
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    max_inflight_groups: int = Field(default=64, ge=1, description="Groups one generator replica works on at a time")

    # Asynchrony
    max_staleness: int = Field(default=2, ge=0, description="Optimizer steps; no group older than this is trained on")
    groups_per_step: int = Field(default=8, ge=1, description="Prompt groups an optimizer step")
    drop_zero_std_groups: bool = Field(
        default=False, description="Drop groups whose rewards are all equal (counted) instead of training on them"
    )

    # Optimisation
    max_steps: int = Field(default=-1, ge=-1, description="Optimizer steps; -1 derives them from num_train_epochs")
    num_train_epochs: float = Field(default=1.0, gt=0)
    learning_rate: Positive = Field(default=1e-6)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = Field(default="linear")
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_epsilon: Positive = Field(default=1e-8)
    max_grad_norm: float = Field(default=1.0, ge=0, description="0 turns clipping off")
    max_tokens_per_microbatch: int = Field(default=16384, ge=1, description="Padded tokens in one forward pass")

    # Loss
    loss_type: Literal["dapo"] = Field(default="dapo", description="The other losses of TRL are not available")
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    epsilon_high: float | None = Field(default=None, gt=0, description="epsilon if left out")
    scale_rewards: Literal["group", "none"] = Field(
        default="group", description="What centred rewards are divided by: the std of their group, or nothing"
    )
    mask_truncated_completions: bool = Field(default=False)
    vllm_importance_sampling_correction: bool = Field(
        default=True, description="Correct for the generator's logprobs not being the trainer's"
    )
    vllm_importance_sampling_cap: Positive = Field(default=3.0, description="Truncation of the importance ratio")

    # Weight push
    weight_transport: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", description="How weights travel; auto is nccl where both ends have a GPU, else gloo"
    )
    push_timeout_s: Positive = Field(default=60.0, description="Deadline of one weight push, all of it")

    # Keeping
    save_steps: int = Field(default=10, ge=1, description="Optimizer steps between checkpoints")
    save_total_limit: int = Field(
        default=2, ge=1, description="Checkpoints kept; the older one is for a damaged newer one"
    )
    log_rollouts_every_steps: int = Field(default=1, ge=1, description="Steps between entries of the rollout log")

    @field_validator("name")
    @classmethod
    def _a_name_is_a_plain_word(cls, name: str | None) -> str | None:
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError("use letters, digits, '.', '_' and '-', at most 64 of them")
        return name

    @field_validator("reward_funcs")
    @classmethod
    def _reward_names_are_distinct(cls, names: list[str]) -> list[str]:
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(f"{', '.join(doubles)} is listed twice; give it one larger weight instead")
        return names

    @model_validator(mode="after")
    def _one_weight_a_reward(self) -> Self:
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} entries for {len(self.reward_funcs)} reward_funcs; "
                "give one weight a function, or leave reward_weights out"
            )
        return self

    @model_validator(mode="after")
    def _the_clip_range_is_not_upside_down(self) -> Self:
        if self.epsilon_high is not None and self.epsilon_high < self.epsilon:
            raise ValueError(
                f"epsilon_high={self.epsilon_high} is below epsilon={self.epsilon}; the upper clip is meant to be the "
                "wider one (DAPO uses 0.2 and 0.28)"
            )
        return self

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

    @model_validator(mode="after")
    def _a_row_fits_a_microbatch(self) -> Self:
        longest = self.max_completion_length + (self.max_prompt_length or 0)
        if longest > self.max_tokens_per_microbatch:
            raise ValueError(
                f"one rollout may have {longest} tokens, more than max_tokens_per_microbatch="
                f"{self.max_tokens_per_microbatch}; raise it to at least {longest}"
            )
        return self

    def weights(self) -> tuple[float, ...]:
        """Return one weight for each reward function."""
        return tuple(self.reward_weights) if self.reward_weights is not None else (1.0,) * len(self.reward_funcs)

    def clip_range(self) -> tuple[float, float]:
        """Return (1 - epsilon, 1 + epsilon_high)."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)


def parse_run_config(raw: Any) -> RunConfig:
    """Return the validated config.

    Raises:
        UserError: One sentence for each thing that is wrong, with the nearest known key for an unknown one.
    """
    import difflib

    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        problems: list[tuple[str, str]] = []
        field: str | None = None
        for item in error.errors(include_url=False, include_input=False):
            where = ".".join(str(part) for part in item["loc"])
            field = field or where or None
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                near = difflib.get_close_matches(where, list(RunConfig.model_fields), n=1)
                message = "there is no such setting" + (f"; did you mean {near[0]}?" if near else "")
            elif item["type"] == "missing":
                message = f"is required: {RunConfig.model_fields[where].description or ''}".rstrip(": ")
            problems.append((where, message))
        summary = "; ".join(f"{where}: {message}" if where else message for where, message in problems)
        raise UserError(summary, field=field, problems=problems) from error
