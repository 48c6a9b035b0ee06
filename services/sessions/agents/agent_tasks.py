"""Defines how worker processes call an agent program that is a Python function, and check its arguments.

async def run(base_url, api_key, prompt, **row):        gets all columns of the row, or only those it names
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    ...
    return 1.0                                          returns its reward, or None if it gives none
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from services.sessions.tools.function_tasks import FunctionTasks
from services.sessions.tools.tool_answer import ToolAnswer, answer
from shared.messages import Prompt
from shared.user_code.limits import Limits
from shared.user_code.module_sources import Sources
from shared.user_code.task_kind import Function
from shared.user_code.worker_frames import Refused
from shared.user_code.worker_pool import WorkerPool

_GIVEN = ("base_url", "api_key")


class AgentCall(msgspec.Struct, frozen=True):
    """The arguments of an agent program. ``row`` has the columns of the data set's row besides the prompt."""

    base_url: str
    api_key: str
    prompt: Prompt
    row: dict[str, Any]


class DescribedAgent(msgspec.Struct, frozen=True, tag=True):
    """Describes a usable agent program: the version of its module's files, or None for a module without a file."""

    sources: Sources | None


AgentPool = WorkerPool[ToolAnswer, DescribedAgent]


class AgentTasks(FunctionTasks, frozen=True):
    """The task of the workers for agent programs: load a function from the allowed ``places``, and call it."""

    @property
    def preload(self) -> tuple[str, ...]:
        """The modules to import once for all workers: this one and, if installed, openai, which takes a second."""
        return __name__, "openai"

    @property
    def description_type(self) -> type[DescribedAgent]:
        """The type that ``describe`` returns for a usable function."""
        return DescribedAgent

    def call(self, name: str, function: Function, call: msgspec.Raw, limits: Limits) -> ToolAnswer:
        """Call an agent program. ``call`` is an encoded AgentCall. The answer's text is the reward, or empty."""
        wanted = msgspec.msgpack.decode(call, type=AgentCall)
        given = {
            **wanted.row, "prompt": wanted.prompt, "base_url": wanted.base_url, "api_key": wanted.api_key,
        }  # fmt: skip
        return answer(function, _accepted(function, given), limits, show=_reward)

    def describe(
        self, name: str, function: Function, sources: Sources | None, kwargs: Mapping[str, Any]
    ) -> DescribedAgent | Refused:
        """Describe a function as an agent program, or refuse it if it does not take ``base_url`` and ``api_key``."""
        missing = [argument for argument in _GIVEN if argument not in _accepted(function, dict.fromkeys(_GIVEN))]
        if missing:
            return Refused(
                f"{name} does not take {' and '.join(missing)}; an agent program is a function "
                "run(base_url, api_key, prompt, **row)"
            )
        return DescribedAgent(sources)


def _accepted(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the given arguments that a function takes: all of them, if it has ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return given
    return {parameter.name: given[parameter.name] for parameter in parameters if parameter.name in given}


def _reward(returned: Any) -> str:
    """Return a reward (a number, or ``reward`` in a dict) as text; empty for None. Raises TypeError for others."""
    if isinstance(returned, dict):
        returned = cast("dict[str, Any]", returned).get("reward")
    if returned is None:
        return ""
    try:
        return repr(float(returned))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"it returned a {type(returned).__name__}; return its reward, a number, or None if it has none"
        ) from error
