"""Calls a tool with the arguments that a model wrote, in a worker, and turns its result into text for the model.

a value     its str(), as TRL shows it to the model
an error    its message
too long    the beginning, and a sentence that says so
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from shared.user_code.error_text import encodable, message_of, users_trace
from shared.user_code.limits import Limits

MAX_RESULT_CHARS = 1 << 18
"""Longest text of a result, about 64,000 tokens."""


class ToolAnswer(msgspec.Struct, frozen=True, tag=True):
    """The text of a result or of an exception. ``trace`` is the stack trace of an exception, for the log."""

    ended: Literal["returned", "raised"]
    text: str
    trace: str = ""


def answer(function: Callable[..., Any], arguments: str, limits: Limits) -> ToolAnswer:
    """Call ``function``, and wait for its result if it is async.

    Args:
        function: The tool.
        arguments: Its keyword arguments, as a JSON object.
        limits: The limits of this process, for messages.
    """
    try:
        returned = function(**json.loads(arguments))
        if inspect.isawaitable(returned):
            returned = asyncio.run(_result(returned))
        return ToolAnswer("returned", shown(returned))
    except BaseException as error:  # noqa: BLE001  user code: a tool may call sys.exit
        return ToolAnswer("raised", shown(message_of(error) or limits.describe(error)), users_trace(error))


def shown(value: object) -> str:
    """Return the text of a value for the model, which is cut if it is too long."""
    text = str(value)
    if len(text) > MAX_RESULT_CHARS:
        text = f"{text[:MAX_RESULT_CHARS]}\n[The first {MAX_RESULT_CHARS} of {len(text)} characters. The rest was cut.]"
    return encodable(text)


async def _result(awaitable: Awaitable[object]) -> object:
    return await awaitable
