"""Calls a tool with the arguments that a model wrote, in a worker, and turns its result into text for the model.

a value     --> its str(), as TRL shows it to the model; a list is kept, too, as TRL shows it to reward functions
an error    --> its message
too long    --> the beginning, and a sentence that says so
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from shared.message_invariants import is_data
from shared.user_code.error_text import encodable, message_of, origin_of, users_trace
from shared.user_code.limits import Limits, is_out_of_memory
from shared.user_code.worker_frames import TaskAnswer

_DEPTH = 4
"""Deepest nesting of a list in a message of a completion."""
MAX_RESULT_CHARS = 1 << 18
"""Longest text of a result, about 64,000 tokens."""

_runner = asyncio.Runner()
"""One event loop for all calls in this process, so that tools can keep clients and locks in global variables."""


class ToolAnswer(TaskAnswer, frozen=True, tag=True):
    """The answer of a worker to a tool call: the text of the result or of the exception.

    ``trace`` is the stack trace of an exception, for the log, and ``origin`` its type and place. ``items`` is the list
    that was returned, if it can be sent.
    """

    ended: Literal["returned", "raised"]
    text: str
    trace: str = ""
    origin: str = ""
    items: list[Any] | None = None

    @property
    def result(self) -> "str | ListResult":
        """The text of the result, or a ListResult if the tool returned a list that can be sent."""
        return self.text if self.items is None else ListResult(self.text, self.items)


@dataclass(frozen=True)
class ListResult:
    """A list that a tool returned. Its ``str()`` is what the model reads."""

    text: str
    items: list[Any]

    def __str__(self) -> str:
        return self.text


def answer(
    function: Callable[..., Any],
    arguments: Mapping[str, Any] | str,
    limits: Limits,
    *,
    show: Callable[[Any], str] = str,
) -> ToolAnswer:
    """Call ``function``, and wait for its result if it is async. Every exception, even SystemExit, becomes an answer.

    Args:
        function: The tool, or another function or method of a user.
        arguments: The keyword arguments, or the text of a JSON object with them.
        limits: The limits of this process, for messages.
        show: Converts the result to text.
    """
    try:
        returned = function(**(json.loads(arguments) if isinstance(arguments, str) else arguments))
        if inspect.isawaitable(returned):
            returned = _runner.run(_result(returned))
        return ToolAnswer("returned", for_model(show(returned)), items=_items(returned))
    except BaseException as error:  # noqa: BLE001  user code: a tool may call sys.exit
        text = for_model(message_of(error) or limits.describe(error))
        is_full = is_out_of_memory(error)
        return ToolAnswer("raised", text, users_trace(error), origin_of(error), is_out_of_memory=is_full)


def for_model(text: str) -> str:
    """Return text that a model can read: cut to MAX_RESULT_CHARS, in valid Unicode."""
    if len(text) > MAX_RESULT_CHARS:
        text = f"{text[:MAX_RESULT_CHARS]}\n[The first {MAX_RESULT_CHARS} of {len(text)} characters. The rest was cut.]"
    return encodable(text)


def _items(value: object) -> list[Any] | None:
    """Return a list as msgpack transfers it (tuples become lists); None for other values and for unsendable lists."""
    if not isinstance(value, list):
        return None
    try:
        encoded = msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    items: list[Any] = msgspec.msgpack.decode(encoded)
    return items if len(encoded) <= MAX_RESULT_CHARS and is_data(items, depth=_DEPTH) else None


async def _result(awaitable: Awaitable[object]) -> object:
    return await awaitable
