"""Compares messages that a client sends back with recorded ones, whatever the client did to their text form. Pure.

    compared     role, text up to surrounding white space, other content, the name of its author if the client wrote it,
                 tool calls by id, name and parsed arguments, the id of the call that a tool message answers
    not          reasoning; ids that do not come back; white space, escapes and key order in JSON arguments

Clients parse tool calls and write them again, and many drop reasoning. If rendered ids were compared, each of these
would look like another conversation, and tokens that were sampled would be rendered again.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from shared.turns import ChatMessage


@dataclass(frozen=True)
class _Call:
    """A tool call. ``arguments`` are compared as JSON values if they can be parsed."""

    call_id: str | None
    name: Any
    arguments: Any


@dataclass(frozen=True)
class ComparableMessage:
    """The parts of a message that are compared."""

    role: Any
    author: Any
    text: str
    other_parts: Any
    calls: tuple[_Call, ...]
    answers_call: str | None

    def comes_back_as(self, given: "ComparableMessage") -> bool:
        """Whether ``given`` is this recorded message, sent back by a client."""
        return (
            (self.role, self.author, self.text, self.other_parts, len(self.calls))
            == (given.role, given.author, given.text, given.other_parts, len(given.calls))
            and _same_id(self.answers_call, given.answers_call)
            and all(
                _same_id(mine.call_id, theirs.call_id)
                and (mine.name, mine.arguments) == (theirs.name, theirs.arguments)
                for mine, theirs in zip(self.calls, given.calls, strict=True)
            )
        )


def comparable(message: ChatMessage) -> ComparableMessage:
    """Return the parts of a message in OpenAI's format that are compared."""
    role = message.get("role")
    text, other_parts = _content(message.get("content"))
    return ComparableMessage(
        role=role,
        author=None if role == "assistant" else json_value(message.get("name")),
        text=text.strip(),
        other_parts=other_parts,
        calls=tuple(map(_call, message.get("tool_calls") or ())),
        answers_call=message.get("tool_call_id"),
    )


def begins_with(given: Sequence[ComparableMessage], recorded: Sequence[ComparableMessage], *, at: int) -> bool:
    """Whether the recorded messages come back in ``given`` from position ``at`` on."""
    return len(given) >= at + len(recorded) and all(
        message.comes_back_as(given[position]) for position, message in enumerate(recorded, start=at)
    )


def json_value(value: Any) -> Any:
    """Return a form of a JSON value that equals another's if and only if they are the same JSON value.

    In Python true equals 1. Here a Boolean becomes a tuple, which no JSON value is.
    """
    if isinstance(value, bool):
        return (value,)
    if isinstance(value, dict):
        return {key: json_value(inner) for key, inner in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in cast("list[Any]", value)]
    return value


def _same_id(recorded: str | None, given: str | None) -> bool:
    return given is None or given == recorded


def _content(content: Any) -> tuple[str, Any]:
    """Return the text of a message's content, and its other parts."""
    if not isinstance(content, list):
        return (content, None) if isinstance(content, str) else ("", json_value(content))
    parts: list[Any] = [*content]
    texts = [part["text"] for part in parts if _is_text(part)]
    return "".join(texts), [json_value(part) for part in parts if not _is_text(part)] or None


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(cast("dict[str, Any]", part).get("text"), str)


def _call(call: Any) -> _Call:
    function: Any = call.get("function") or {}
    return _Call(call.get("id") or None, function.get("name"), _arguments(function.get("arguments")))


def _arguments(arguments: Any) -> Any:
    """Return arguments as a JSON value; as text if they are not JSON."""
    if not isinstance(arguments, str):
        return json_value(arguments)
    try:
        return json_value(json.loads(arguments, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return arguments.strip()


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
