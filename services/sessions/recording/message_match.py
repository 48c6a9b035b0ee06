"""Recognises a message that the policy sampled when a client sends it back in another form. Pure.

    compared         role, text without surrounding white space, other content, tool calls (id, name, parsed arguments)
    not compared     reasoning; call ids that a client leaves out; white space, escapes and key order in JSON arguments

Clients parse tool calls and write them again, and many drop reasoning. If the token ids of messages were compared, each
such message would begin another conversation, and its sampled tokens would be rendered again. Messages that the client
wrote itself are not compared here: if they do not come back unchanged, the conversation is another one (recording.py).
"""

import json
from dataclasses import dataclass
from typing import Any, cast

from shared.turns import ChatMessage

_MAX_VALUES = 1 << 16
"""Most values of arguments that are parsed; more are compared as text. Parsing 8 MiB of "[]," takes seconds."""


@dataclass(frozen=True)
class _Call:
    """A tool call. ``arguments`` are compared as JSON values if they can be parsed."""

    call_id: str | None
    name: str
    arguments: Any


@dataclass(frozen=True)
class ComparableMessage:
    """The parts of a chat message that are compared to recognise a sampled message."""

    role: str
    text: str
    other_parts: Any
    calls: tuple[_Call, ...]

    def comes_back_as(self, given: "ComparableMessage") -> bool:
        """Whether ``given`` is this sampled message, sent back by a client."""
        return (self.role, self.text, self.other_parts, len(self.calls)) == (
            given.role, given.text, given.other_parts, len(given.calls)
        ) and all(
            theirs.call_id in (None, mine.call_id) and (mine.name, mine.arguments) == (theirs.name, theirs.arguments)
            for mine, theirs in zip(self.calls, given.calls, strict=True)
        )  # fmt: skip


def comparable(message: ChatMessage) -> ComparableMessage:
    """Return the comparable parts of a chat message that ``check_recordable`` has accepted."""
    text, other_parts = _content(message.get("content"))
    return ComparableMessage(
        role=message["role"],
        text=text.strip(),
        other_parts=other_parts,
        calls=tuple(map(_call, message.get("tool_calls") or ())),
    )


def _json_value(value: Any) -> Any:
    """Return a form of a JSON value. Two forms are equal if and only if their JSON values are.

    In Python true equals 1. Here a Boolean becomes a tuple, which no JSON value is.
    """
    if isinstance(value, bool):
        return (value,)
    if isinstance(value, dict):
        return {key: _json_value(inner) for key, inner in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        items: list[Any] = [*value]
        return [_json_value(item) for item in items]
    return value


def _content(content: str | list[dict[str, Any]] | None) -> tuple[str, Any]:
    """Return the text parts of a message's content, joined with newlines, and its other parts, None without any."""
    if not isinstance(content, list):
        return content or "", None
    texts = [part["text"] for part in content if _is_text(part)]
    return "\n".join(texts), [_json_value(part) for part in content if not _is_text(part)] or None


def _is_text(part: dict[str, Any]) -> bool:
    return isinstance(part.get("text"), str)


def _call(call: dict[str, Any]) -> _Call:
    function = call["function"]
    return _Call(call.get("id") or None, function["name"], _arguments(function.get("arguments")))


def _arguments(arguments: Any) -> Any:
    """Return a call's arguments as a JSON value; {} for none, and the text itself if it is not JSON or too large."""
    if not isinstance(arguments, str):
        return _json_value(arguments)
    text = arguments.strip() or "{}"
    if sum(map(text.count, "[{,")) > _MAX_VALUES:
        return text
    try:
        return _json_value(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return text


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
