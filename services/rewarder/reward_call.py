"""The arguments that a reward function is called with, and the conversion of its return value into verdicts.

    RewardCall --arguments_for--> f(prompts=, completions=, ...) --judge--> one Verdict per completion

The signature is TRL's. Every dataset column is a list with one entry per completion. ``trainer_state`` has the
training's progress, ``environments`` are stand-ins for the rollouts' environments (ended_environment.py), and
``log_extra`` and ``log_metric`` keep values (logged_values.py). A function without ``**kwargs`` gets only the arguments
that it names. If the reward that it returns for a completion is not a finite number, the outcome has no value.
"""

import copy
import inspect
import itertools
import json
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import msgspec

from services.rewarder.ended_environment import EndedEnvironment
from services.rewarder.function_parameters import may_see, parameters_of, required, takes_any
from services.rewarder.logged_values import LoggedValues
from services.rewarder.trainer_state import TrainerState
from shared.arrays import unpack_ids
from shared.errors import UserError
from shared.message_invariants import Finite
from shared.messages import RETURNED_LIST, CallOutcome, Completion, PlayedEnvironment, Prompt
from shared.run_options.reward_kwargs import also_columns
from shared.user_code.error_text import at_most, printable

RewardFunction = Callable[..., Any]

NOT_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that TRL does not pass on, because the call has arguments with these or similar names."""
_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, AbstractSet)
"""Types that can be iterated over but cannot be a list of rewards. Sets, for example, do not have an order."""
_GIVEN = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
)


def text_of(completion: Completion) -> str:
    """Return a completion's text; for a conversation, the last assistant message's text, or else the last message's."""
    if isinstance(completion, str):
        return completion
    said = [message for message in completion if message.get("role") == "assistant"] or completion
    return said[-1].get("content") or ""


class RewardCall(msgspec.Struct, frozen=True):
    """The data for one call of a reward function. Every list has one entry per completion.

    A function may change its prompts, completions and columns, so each function gets its own copy: from
    ``own_copy``, or decoded from msgpack in a worker.

    ``completion_ids`` stay packed as int32 bytes until a function reads them, because few functions do, and a group may
    have 100,000 token ids.
    ``policy_version`` is the version of the group's oldest token. It and ``group_id`` are None outside of runs.
    """

    prompts: list[Prompt]
    completions: list[Completion]
    columns: dict[str, list[Any]]
    completion_ids: list[bytes] | None = None
    trainer_state: TrainerState = TrainerState()
    max_completion_length: int | None = None
    group_id: str | None = None
    policy_version: int | None = None
    chat_template_kwargs: dict[str, Any] = {}
    reward_kwargs: dict[str, dict[str, Any]] = {}
    """Extra keyword arguments, by function."""
    environments: list[PlayedEnvironment] | None = None
    """None unless the rollouts were played in environments."""
    timeout_s: float | None = None
    """Deadline of a function that is called in a worker, in seconds."""

    def completion_id_lists(self) -> list[list[int]] | None:
        """Return the token ids of each completion as new lists, or None if the call has no token ids."""
        return None if self.completion_ids is None else [unpack_ids(ids).tolist() for ids in self.completion_ids]


def with_objects(completion: Completion) -> Completion:
    """Return a completion in TRL's form: arguments of tool calls are objects, and a tool's list is a list, not text.

    Arguments stay text if they are not a JSON object, or contain half a surrogate pair, which cannot be sent on.
    """
    return completion if isinstance(completion, str) else [_message_with_objects(message) for message in completion]


def _message_with_objects(message: dict[str, Any]) -> dict[str, Any]:
    if calls := message.get("tool_calls"):
        return message | {"tool_calls": [_with_object(call) for call in calls]}
    if (returned := message.get(RETURNED_LIST)) is not None:
        return {name: value for name, value in message.items() if name != RETURNED_LIST} | {"content": returned}
    return message


def _with_object(call: Any) -> Any:
    try:
        arguments: Any = json.loads(call["function"]["arguments"])
        msgspec.json.encode(arguments)
    except (TypeError, KeyError, ValueError, RecursionError):
        return call
    return call | {"function": call["function"] | {"arguments": arguments}} if isinstance(arguments, dict) else call


def require_sendable(call: RewardCall) -> None:
    """Raise UserError if a call cannot be encoded as msgpack, the format in which it is sent to workers."""
    try:
        msgspec.msgpack.encode(call)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"the completions or columns cannot be passed on: {error}") from error


def own_copy(call: RewardCall) -> RewardCall:
    """Return a copy of a call that one reward function may change without affecting other functions."""
    columns: dict[str, list[Any]] = msgspec.msgpack.decode(msgspec.msgpack.encode(call.columns))
    return msgspec.structs.replace(
        call,
        prompts=[own_text(prompt) for prompt in call.prompts],
        completions=[own_text(completion) for completion in call.completions],
        columns=columns,
        environments=copy.deepcopy(call.environments),
    )


def own_text(text: Completion) -> Completion:
    """Return a copy of a prompt or completion that shares no mutable object with the original."""
    return text if isinstance(text, str) else [_own_message(message) for message in text]


def _own_message(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value if type(value) is str else copy.deepcopy(value) for name, value in message.items()}


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one function for one completion. Only ``scored`` has a value."""

    outcome: CallOutcome
    value: Finite | None = None
    detail: str = ""
    components: dict[str, Finite] = {}
    metrics: dict[str, Finite] = {}
    """The means that the call logged with ``log_metric``; the same for all completions."""
    extra: dict[str, str | Finite] = {}
    """The values that the call logged for this completion with ``log_extra``."""


def answers_all(verdicts: Sequence[Verdict], num_completions: int) -> bool:
    """Return whether there is one verdict per completion, and exactly the ``scored`` verdicts have a value."""
    return len(verdicts) == num_completions and all(
        (verdict.outcome == "scored") == (verdict.value is not None) for verdict in verdicts
    )


class CallError(Exception):
    """The function cannot be called with the given rows and ``reward_kwargs``. The message says why."""


def arguments_for(
    function: RewardFunction,
    call: RewardCall,
    *,
    name: str = "",
    is_built_in: bool = False,
    options: Collection[str] = (),
    may_be_given: Collection[str] | None = None,
    logged: LoggedValues | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments to call a reward function with.

    Args:
        function: The function to call.
        call: The rows to score.
        name: The function's name in ``reward_kwargs``.
        is_built_in: Whether the function is a built-in, which gets more arguments than TRL passes.
        options: Arguments that are never taken from a column.
        may_be_given: Missing arguments for which the error message may suggest ``reward_kwargs``; all if None.
        logged: Collects the values that the function logs.

    Raises:
        CallError: A required argument is missing, or ``reward_kwargs`` has one that is not taken, or is a column too.
    """
    kwargs = copy.deepcopy(call.reward_kwargs.get(name, {}))
    offered = {column: values for column, values in call.columns.items() if column not in NOT_COLUMNS}
    if doubles := also_columns({"it": kwargs}, offered):
        raise CallError(doubles[0].removeprefix("it "))
    arguments: dict[str, Any] = {column: offered[column] for column in offered if column not in options} | kwargs
    logged = logged or LoggedValues()
    arguments |= {
        "prompts": call.prompts,
        "completions": [with_objects(completion) for completion in call.completions],
        "trainer_state": call.trainer_state,
        "log_extra": logged.log_extra,
        "log_metric": logged.log_metric,
    }
    if call.environments is not None:
        arguments["environments"] = [EndedEnvironment(played) for played in call.environments]
    parameters = parameters_of(function)
    if call.completion_ids is not None and may_see("completion_ids", function):
        arguments["completion_ids"] = call.completion_id_lists()
    if is_built_in and call.max_completion_length is not None:
        arguments["max_completion_length"] = call.max_completion_length
    if parameters is None:
        return arguments
    if why_not := refused_kwargs(function, kwargs):
        raise CallError(why_not)
    missing = [name for name in required(parameters) if name not in arguments]
    if "completion_ids" in missing:
        raise CallError(
            "needs 'completion_ids', which only a run sets by itself: send it in the request, "
            "one list of token ids for each completion"
        )
    if "environments" in missing:
        raise CallError("needs 'environments', which only a run with environment_factory has")
    if missing:
        columns = ", ".join(sorted(call.columns)) or "none"
        ways = ["rename the column" if is_built_in else "rename the column or the parameter"]
        if may_be_given is None or set(missing) <= set(may_be_given):
            ways.append("give it in reward_kwargs (--kwargs of a check)")
        if not is_built_in:
            ways.append("give the parameter a default")
        raise CallError(
            f"needs {_quoted(missing)}, and there is no such column; the columns are: {at_most(120, columns)}. "
            f"{', or '.join(ways).capitalize()}"
        )
    if takes_any(parameters):
        return arguments
    return {parameter.name: arguments[parameter.name] for parameter in parameters if parameter.name in arguments}


def refused_kwargs(function: RewardFunction, kwargs: Mapping[str, Any]) -> str | None:
    """Return the reason why ``function`` does not take these keyword arguments, or None if it does."""
    parameters = parameters_of(function)
    if parameters is None or takes_any(parameters):
        return None
    names = [parameter.name for parameter in parameters if parameter.name not in _GIVEN]
    unknown = [name for name in kwargs if name not in names]
    if not unknown:
        return None
    takes = f"it takes: {', '.join(names)}" if names else "it takes only the arguments that every function is given"
    return f"takes no argument {_quoted(unknown)}, which reward_kwargs gives it; {takes}"


def required_columns(function: RewardFunction) -> list[str]:
    """Return the names of the dataset columns that ``function`` requires; empty if it does not have a signature."""
    parameters = parameters_of(function)
    return [] if parameters is None else [name for name in required(parameters) if name not in _GIVEN]


def with_logged(verdicts: list[Verdict], logged: LoggedValues) -> list[Verdict]:
    """Return the verdicts with the values that the function logged with ``log_metric`` and ``log_extra``."""
    metrics = logged.metrics()
    return [
        msgspec.structs.replace(verdict, metrics=metrics, extra=extra) if metrics or extra else verdict
        for verdict, extra in ((verdict, logged.extra_of(number)) for number, verdict in enumerate(verdicts))
    ]


def judge(returned: object, num_completions: int, *, is_built_in: bool = False) -> list[Verdict]:
    """Convert the value that a reward function returned, which may be any object, into one verdict per completion.

    With ``is_built_in``, the entries of the returned list may be verdicts already.
    """
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        return everyone(num_completions, "invalid", "returned an awaitable; declare it `async def`")
    kind = type(returned).__name__
    if isinstance(returned, _NO_LISTS) or not isinstance(returned, Iterable):
        return everyone(num_completions, "invalid", f"returned {kind}, not a list of {num_completions} numbers")
    values = list(itertools.islice(cast("Iterable[object]", returned), num_completions + 1))
    if len(values) != num_completions:
        count = f"more than {num_completions}" if len(values) > num_completions else str(len(values))
        detail = f"returned {count} rewards for {num_completions} completions; return one for each"
        return everyone(num_completions, "invalid", detail)
    return [value if is_built_in and isinstance(value, Verdict) else _judge_one(value) for value in values]


def everyone(num_completions: int, outcome: CallOutcome, detail: str) -> list[Verdict]:
    """Return ``num_completions`` equal verdicts without a value, for example after a failed call."""
    return [Verdict(outcome, None, printable(detail))] * num_completions


def _judge_one(value: object) -> Verdict:
    if type(value) is float and math.isfinite(value):  # the usual case
        return Verdict("scored", value)
    if value is None:
        return Verdict("not_applicable")
    try:
        number: object = value if isinstance(value, numbers.Real) else getattr(value, "item")()  # noqa: B009
        result = float(number) if isinstance(number, numbers.Real) else None
    except Exception:  # noqa: BLE001  user code: any object can be in the list
        result = None
    if result is None:
        return Verdict("invalid", None, printable(f"returned {type(value).__name__} instead of a number"))
    if not math.isfinite(result):
        return Verdict(
            "invalid", None, f"returned {result}; return None for a completion the function does not apply to"
        )
    return Verdict("scored", result)


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
