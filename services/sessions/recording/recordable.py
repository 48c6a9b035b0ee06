"""Checks that the messages of a request have OpenAI's form and can be recorded, before they are used. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from shared.errors import MessageError
from shared.message_invariants import is_data
from shared.turns import ChatMessage


class _Function(msgspec.Struct):
    name: str


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


def check_recordable(messages: Sequence[ChatMessage]) -> None:
    """Raise MessageError unless the messages have OpenAI's form and can be encoded for a recording."""
    if not is_data(list(messages)):
        raise MessageError("a message is nested too deeply, or has a value that is not data")
    try:
        msgspec.convert(messages, list[_Message])
        msgspec.msgpack.encode(messages)
    except (ValueError, OverflowError) as error:
        raise MessageError(f"a message cannot be used: {error}") from error
