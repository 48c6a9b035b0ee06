"""The settings of one run, as a user submits them. Names come from TRL's ``GRPOConfig`` where the meaning is the same.

The run API validates them once, before anything starts. They are then stored in Redis and read by every service.
Unknown keys are refused, and so are combinations that make no sense, with the reason.
"""

import math
from collections import Counter
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shared.errors import UserError
from shared.near_name import nearest
from shared.run_options.agents import AgentOptions
from shared.run_options.beginning import BeginningOptions
from shared.run_options.data import DataOptions, DatasetSource
from shared.run_options.from_trl import INSTEAD, INSTEAD_IN_DATASETS
from shared.run_options.generation import INSTEAD_IN_GENERATION_KWARGS, GenerationKwargs, GenerationOptions
from shared.run_options.keeping import KeepingOptions
from shared.run_options.labels import LabelOptions
from shared.run_options.lora import LoraOptions
from shared.run_options.loss import LossOptions
from shared.run_options.pushing import PushingOptions
from shared.run_options.reward_kwargs import MAX_REWARD_FUNCS, RewardKwargs, RewardName, check_reward_kwargs
from shared.run_options.section import Positive, steps_of
from shared.run_options.training import TrainingOptions
from shared.run_options.wording import what_is_wrong

_MAX_PROBLEMS = 100


class RunConfig(
    LabelOptions,
    GenerationOptions,
    AgentOptions,
    LossOptions,
    TrainingOptions,
    LoraOptions,
    DataOptions,
    BeginningOptions,
    KeepingOptions,
    PushingOptions,
):
    """The settings of a run. Required are ``model``, a data set and, without environment or agent, ``reward_funcs``."""

    # Model
    model: str = Field(description="Directory or Hugging Face id of a causal language model")
    model_revision: str | None = Field(default=None, description="Git revision of a hub model")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of the computation and of the generator; master weights are float32"
    )

    # Rewards
    reward_funcs: list[RewardName] = Field(
        default=[],
        validate_default=True,
        max_length=MAX_REWARD_FUNCS,
        description="Built-in names, endpoints, 'package.module:function' with TRL's signature, or reward models: "
        "'org/name' or a directory; only a run whose environment has get_reward needs none",
    )
    reward_weights: list[float] | None = Field(
        default=None, max_length=MAX_REWARD_FUNCS, description="One weight for each function; all 1.0 if left out"
    )
    reward_kwargs: RewardKwargs = Field(
        default={}, description="Extra keyword arguments by reward function: `{NAME: {ARGUMENT: value}}`; no secrets"
    )
    reward_timeout_s: Positive = Field(default=30.0, description="Deadline of a function for a group, in seconds")
    min_scored_completions: int = Field(
        default=2, ge=2, description="A group with fewer scored completions is dropped (counted)"
    )
    reward_failure_threshold: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="The run pauses if a function fails for a larger share of completions, or more rollouts are lost",
    )
    reward_failure_window: int = Field(
        default=16, ge=1, description="Number of newest groups over which that share is taken"
    )

    # Asynchrony
    max_staleness: int = Field(
        default=2,
        ge=0,
        description="Most optimizer steps by which a group may be stale; older groups are not trained on",
    )
    admission: Literal["just_in_time", "eager"] = Field(
        default="just_in_time",
        description="When prompts are sent: as late as keeps the trainer fed, or as early as max_staleness allows",
    )
    groups_per_step: int = Field(default=8, ge=1, description="Prompt groups in an optimizer step")
    drop_zero_std_groups: bool = Field(
        default=False, description="Drop groups whose rewards are all equal (counted) instead of training on them"
    )

    @field_validator("reward_funcs", mode="before")
    @classmethod
    def _one_name_is_a_list_of_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("reward_funcs")
    @classmethod
    def _reward_names_are_distinct(cls, names: list[str], info: ValidationInfo) -> list[str]:
        if not names and info.data.get("environment_factory") is None and info.data.get("agent") is None:
            raise ValueError(f"is required: {cls.model_fields['reward_funcs'].description}")
        doubles = sorted(name for name, count in Counter(names).items() if count > 1)
        if doubles:
            raise ValueError(f"{', '.join(doubles)} is listed twice; give it one larger weight instead")
        return names

    @model_validator(mode="after")
    def _a_run_trains_or_evaluates(self) -> Self:
        if self.max_steps == 0 and not self.eval_on_start:
            raise ValueError(
                "max_steps=0 trains nothing; use -1 to derive it from num_train_epochs, or set eval_on_start: true to "
                "evaluate only"
            )
        return self

    @model_validator(mode="after")
    def _one_weight_a_reward(self) -> Self:
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} entries for {len(self.reward_funcs)} reward_funcs; "
                "give one weight a function, or leave reward_weights out"
            )
        return self

    @model_validator(mode="after")
    def _a_group_can_have_enough_scored_completions(self) -> Self:
        if self.min_scored_completions > self.num_generations:
            raise ValueError(
                f"min_scored_completions={self.min_scored_completions} is more than num_generations="
                f"{self.num_generations}: every group would be dropped; lower it to at most {self.num_generations}"
            )
        return self

    @model_validator(mode="after")
    def _reward_kwargs_are_for_reward_funcs(self) -> Self:
        check_reward_kwargs(self.reward_kwargs, self.reward_funcs)
        return self

    @model_validator(mode="after")
    def _staleness_admits_the_last_step_of_a_batch(self) -> Self:
        steps = self.steps_per_batch()
        if self.max_staleness < steps - 1:
            raise ValueError(
                f"num_iterations={self.num_iterations} and steps_per_generation={self.steps_per_generation} make "
                f"{steps} optimizer steps on one batch: even the freshest group is {steps - 1} steps stale in the last "
                f"of them, but max_staleness={self.max_staleness}; raise it to at least {steps - 1}, and to "
                f"{2 * steps - 1} if generation should go on while a batch is trained"
            )
        return self

    @model_validator(mode="after")
    def _a_streamed_run_has_a_length(self) -> Self:
        if self.dataset_streaming and self.max_steps < 0:
            raise ValueError(
                "dataset_streaming needs max_steps: the rows of the data set are not counted, so num_train_epochs has "
                "no length in steps"
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

    @model_validator(mode="after")
    def _lora_goes_with_the_rest(self) -> Self:
        if self.use_peft and self.sync_ref_model:
            raise ValueError(
                "sync_ref_model moves a reference model towards the policy, but use_peft has none: the reference is "
                "the base with the adapters off. Leave out one setting"
            )
        if self.load_in_4bit and self.dtype != "bfloat16":
            raise ValueError("load_in_4bit needs GPUs, on which adapters are served in bfloat16; set dtype: bfloat16")
        if self.load_in_4bit and (self.nnodes > 1 or self.nproc_per_node not in ("auto", 1)):
            raise ValueError(
                "load_in_4bit trains on one GPU: a base in 4 bits is not sharded. Set nproc_per_node: 1 and nnodes: 1"
            )
        return self

    def in_steps(self, total_steps: int) -> Self:
        """Return a copy in which save, eval and logging steps are whole steps instead of shares of ``total_steps``."""
        given = {"save_steps": self.save_steps, "eval_steps": self.eval_steps, "logging_steps": self.logging_steps}
        steps = {name: max(1, steps_of(value, total_steps)) for name, value in given.items() if value is not None}
        return self.model_copy(update=steps)

    def longest_rollout(self) -> int | None:
        """Return the most tokens that a prompt and its completion may have together; None if prompts have no limit.

        It is also None for an agentic run: ``max_prompt_length`` limits only the row's prompt, and the first turn also
        has the tools' schemas, the environment's text, or the agent program's own messages.
        """
        if self.is_agentic or self.max_prompt_length is None:
            return None
        return self.max_prompt_length + self.max_completion_length

    def whole_epochs(self, epochs_of_steps: float) -> int:
        """Return the epochs of the run as transformers counts them: whole, and at least one.

        Args:
            epochs_of_steps: Passes over the data set in all steps of the run. Only used if ``max_steps`` is set.
        """
        epochs = self.num_train_epochs if self.max_steps < 0 else epochs_of_steps
        return max(1, math.ceil(epochs - 1e-9))  # 98 times 1 / 49 may be more than 2

    def weights(self) -> tuple[float, ...]:
        """Return ``reward_weights``; if it is not set, 1.0 for each reward function."""
        return tuple(self.reward_weights) if self.reward_weights is not None else (1.0,) * len(self.reward_funcs)


def parse_run_config(raw: Any) -> RunConfig:
    """Validate a run's settings, as read from YAML or JSON.

    Raises:
        UserError: The settings are wrong. ``problems`` has a sentence for each problem, with a hint for unknown keys.
    """
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        problems = _problems(error)
        field = next((where for where, _ in problems if where), None)
        summary = "; ".join(f"{where}: {message}" if where else message for where, message in problems)
        raise UserError(summary, field=field, problems=problems) from error


_TABLES: Mapping[int | str, tuple[Mapping[str, FieldInfo], Mapping[str, str]]] = {
    "datasets": (DatasetSource.model_fields, INSTEAD_IN_DATASETS),
    "generation_kwargs": (GenerationKwargs.model_fields, INSTEAD_IN_GENERATION_KWARGS),
}
"""Settings of the tables inside a run, and what to write instead of settings they do not have."""


def _problems(error: ValidationError) -> list[tuple[str, str]]:
    """Return (setting, message) pairs in the terms of a run file. The errors of one value become one message."""
    found: dict[str, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False):
        where = _where(item["loc"])
        if where in found or len(found) < _MAX_PROBLEMS:
            found.setdefault(where, []).append(item)
    return [(where, _sentence(items)) for where, items in found.items()]


def _where(loc: tuple[int | str, ...]) -> str:
    """Return the dotted name of the wrong setting, without the parts that pydantic adds for unions and table keys."""
    for depth in range(1, len(loc)):
        field = _settings_beside(loc[:depth])[0].get(str(loc[depth - 1]))
        if field is not None and _has_alternatives(field.annotation):
            loc = loc[:depth]
            break
    if loc and loc[-1] == "[key]":
        loc = (*loc[:-2], "a name in it")
    return ".".join(str(part) for part in loc)


def _settings_beside(loc: tuple[int | str, ...]) -> tuple[Mapping[str, FieldInfo], Mapping[str, str]]:
    """Return the settings of the table that ``loc`` is in, and hints for settings that the table does not have."""
    return _TABLES[loc[0]] if len(loc) > 1 and loc[0] in _TABLES else (RunConfig.model_fields, INSTEAD)


def _has_alternatives(annotation: Any) -> bool:
    is_union = get_origin(annotation) in (Union, UnionType)
    return is_union and sum(kind is not NoneType for kind in get_args(annotation)) > 1


def _sentence(items: list[ErrorDetails]) -> str:
    loc, kind = items[0]["loc"], items[0]["type"]
    if not loc and kind == "model_type":
        return "a run is a table of settings, such as `model: NAME`"
    name = str(loc[-1]) if loc else ""
    known, instead_of = _settings_beside(loc)
    if kind == "extra_forbidden":
        near = nearest(name, known)
        hint = instead_of.get(name) or (f"did you mean {near}?" if near else "")
        return f"there is no such setting; {hint}" if hint else "there is no such setting"
    if kind == "missing" and name in known:
        return f"is required: {known[name].description or ''}".rstrip(": ")
    return what_is_wrong(items)
