"""Request and response bodies of the rewarder's HTTP routes: strict types, no unknown keys, limited nesting."""

from collections.abc import Sequence
from typing import Annotated, Any, Self, get_args

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from services.rewarder.reward_answer import Kind
from services.rewarder.reward_call import RewardCall
from services.rewarder.strict_body import Body, refuse_deep_nesting
from shared.arrays import ID_DTYPE, pack_ids
from shared.messages import CallOutcome, Prompt
from shared.near_name import nearest
from shared.run_options.reward_kwargs import MAX_REWARD_FUNCS, RewardKwargs, RewardName, check_reward_kwargs
from shared.serving.page_cursor import NEXT_MEANING

MAX_COMPLETIONS = 4096
MAX_COLUMNS = 1000
MAX_WEIGHT = 1e6


KWARGS_MEANING = "Extra keyword arguments by reward function, as in a run"


class CheckRequest(Body):
    """The reward functions to check, and their extra keyword arguments."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"reward_funcs": ["accuracy_reward"]}]})

    reward_funcs: list[RewardName] = Field(min_length=1, max_length=MAX_REWARD_FUNCS)
    reward_kwargs: RewardKwargs = Field(default={}, description=KWARGS_MEANING)

    @model_validator(mode="after")
    def _reward_kwargs_are_for_reward_funcs(self) -> Self:
        check_reward_kwargs(self.reward_kwargs, self.reward_funcs)
        return self


class RewardFunctionInfo(Body):
    """A reward function's name, kind, summary, required columns and version."""

    name: str
    kind: Kind
    summary: str
    required_columns: list[list[str]] = Field(description="The dataset needs one column from each inner list")
    version: str = Field(default="", description="The version in force; empty for built-ins")
    warning: str = Field(default="", description="Why an edit of its module is not in force; empty otherwise")


class RewardFunctions(Body):
    """The functions of a check, all of which can be used."""

    reward_funcs: list[RewardFunctionInfo]


class RewardFunctionPage(RewardFunctions):
    """A page of reward functions: built-ins, loaded functions and models, endpoints. Each kind is sorted by name."""

    next_cursor: str | None = Field(description=NEXT_MEANING)


class ChatMessage(Body):
    """One message of a conversation: its role, such as ``user``, and its text."""

    role: str
    content: str


Text = str | Annotated[list[ChatMessage], Field(fail_fast=True)]
TokenIds = Annotated[
    list[Annotated[int, Field(ge=np.iinfo(ID_DTYPE).min, le=np.iinfo(ID_DTYPE).max)]], Field(fail_fast=True)
]
"""``fail_fast`` in long lists reports only the first mistake: reporting millions would block all other requests."""


class Rows(Body):
    """Prompts and completions to score, with their dataset columns. Every list has one entry per completion."""

    prompts: list[Text] = Field(min_length=1, max_length=MAX_COMPLETIONS)
    completions: list[Text] = Field(max_length=MAX_COMPLETIONS)
    completion_ids: Annotated[list[TokenIds], Field(fail_fast=True)] | None = Field(
        default=None, max_length=MAX_COMPLETIONS
    )
    columns: dict[str, list[Any]] = Field(
        default={}, max_length=MAX_COLUMNS, description="Dataset columns, for example `solution`"
    )
    max_completion_length: int | None = Field(default=None, ge=1)
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="Passed to the chat template of reward models; as in a run"
    )
    timeout_s: float = Field(default=30.0, gt=0, le=600, description="Deadline of each function, in seconds")

    @field_validator("prompts", "completions")
    @classmethod
    def _conversations_say_something(cls, texts: list[Text]) -> list[Text]:
        for index, text in enumerate(texts):
            if isinstance(text, list) and not text:
                raise ValueError(f"entry {index} is a list without messages; send text, or at least one message")
        return texts

    @field_validator("columns", "chat_template_kwargs")
    @classmethod
    def _columns_are_shallow(cls, columns: dict[str, Any]) -> dict[str, Any]:
        refuse_deep_nesting(columns)
        return columns

    @model_validator(mode="after")
    def _one_entry_a_completion(self) -> Self:
        lists = {"completions": self.completions, "completion_ids": self.completion_ids, **self.columns}
        wrong = [
            f"{name} has {len(value)}"
            for name, value in lists.items()
            if value is not None and len(value) != len(self.prompts)
        ]
        if wrong:
            num_prompts = len(self.prompts)
            there = "is 1 prompt" if num_prompts == 1 else f"are {num_prompts} prompts"
            raise ValueError(f"there {there}, but {', '.join(wrong)}")
        return self

    def call(self) -> RewardCall:
        """Return these rows as a RewardCall, the input of reward functions."""
        return RewardCall(
            prompts=[_plain(prompt) for prompt in self.prompts],
            completions=[_plain(completion) for completion in self.completions],
            columns=self.columns,
            completion_ids=None if self.completion_ids is None else list(map(pack_ids, self.completion_ids)),
            max_completion_length=self.max_completion_length,
            chat_template_kwargs=self.chat_template_kwargs,
        )


def _plain(text: Text) -> Prompt:
    if isinstance(text, str):
        return text
    return [{"role": message.role, "content": message.content} for message in text]


class ScoreRequest(Rows):
    """Completions to score now, and the reward functions to score them with."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "reward_funcs": ["accuracy_reward", "think_format_reward"],
                    "reward_weights": [1.0, 0.1],
                    "prompts": ["1/2+1/4?"],
                    "completions": ["It is \\boxed{0.75}."],
                    "columns": {"solution": ["3/4"]},
                }
            ]
        }
    )

    reward_funcs: list[RewardName] = Field(min_length=1, max_length=MAX_REWARD_FUNCS)
    reward_weights: list[Annotated[float, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]] | None = Field(
        default=None, max_length=MAX_REWARD_FUNCS, description="One per function; all 1.0 if left out"
    )
    reward_kwargs: RewardKwargs = Field(default={}, description=KWARGS_MEANING)

    @model_validator(mode="after")
    def _one_weight_a_function(self) -> Self:
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} entries for {len(self.reward_funcs)} reward_funcs"
            )
        return self

    @model_validator(mode="after")
    def _reward_kwargs_are_for_reward_funcs(self) -> Self:
        check_reward_kwargs(self.reward_kwargs, self.reward_funcs)
        return self

    def call(self) -> RewardCall:
        """Return these rows as a RewardCall, with the request's ``reward_kwargs``."""
        return msgspec.structs.replace(super().call(), reward_kwargs=self.reward_kwargs)

    def weights(self) -> list[float]:
        """Return one weight per function, all 1.0 if the request has none."""
        return [1.0] * len(self.reward_funcs) if self.reward_weights is None else self.reward_weights


class OutcomeBody(Body):
    """The outcome of one function for one completion. Only ``scored`` has a value."""

    name: str
    outcome: CallOutcome
    value: float | None
    weight: float
    detail: str
    latency_s: float
    components: dict[str, float] = Field(description="The parts of the value, if the function reports them")
    version: str = Field(description="The function's version; the same code or endpoint has the same version")
    metrics: dict[str, float] = Field(
        default={}, description="Means of the numbers logged with log_metric; the same for the whole group"
    )
    extra: dict[str, str | float] = Field(
        default={}, description="The values logged with log_extra for this completion"
    )


class ScoreReply(Body):
    """The outcomes of each completion, and their weighted sum: null if a function failed, or if no function applies."""

    outcomes: list[list[OutcomeBody]]
    rewards: list[float | None]


class Health(Body):
    """The body of a health check that passed."""

    status: str


def no_such_field(body: object, location: Sequence[int | str]) -> str:
    """Return the error message for an unknown field.

    Args:
        body: The type annotation of the body, usually its pydantic model.
        location: The field's location in the body, as reported by pydantic.
    """
    known = _fields(body, location[:-1])
    near = nearest(str(location[-1]), known) if location else None
    if near:
        return f"unknown field; did you mean {near}?"
    return f"unknown field; the known fields are {', '.join(known)}" if known else "unknown field"


def _fields(annotation: object, path: Sequence[int | str]) -> list[str]:
    models = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    model = next((kind for kind in models if issubclass(kind, BaseModel)), None)
    if model is None:
        return []
    if not path:
        return list(model.model_fields)
    field: Any = model.model_fields.get(str(path[0]))
    return [] if field is None else _fields(field.annotation, path[1:])
