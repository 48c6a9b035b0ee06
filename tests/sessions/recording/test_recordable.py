"""Which messages of a client are refused before anything is done with them."""

from typing import Any

import msgspec
import pytest

from services.sessions.recording.recordable import check_recordable
from shared.errors import MessageError
from tests.sessions.scripted import assistant, call, tool, user

pytestmark = pytest.mark.unit


def nested(depth: int) -> Any:
    return msgspec.json.decode(b"[" * depth + b"]" * depth)


def test_what_clients_send_is_accepted() -> None:
    check_recordable(
        [
            user("2+2?") | {"name": "Ann"},
            {"role": "user", "content": [{"type": "text", "text": "and?"}, {"type": "image_url", "image_url": {}}]},
            assistant("", call("add", '{"a": 2'), call("add", "", call_id=None)),
            {"role": "assistant", "content": None, "tool_calls": None, "reasoning_content": "hm"},
            tool("4"),
        ]
    )


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": "2+2?"}, "role"),
        ({"role": 3}, r"\$\[1\].role"),
        ({"role": "user", "content": 3}, "content"),
        ({"role": "user", "content": ["x"]}, r"content\[0\]"),
        ({"role": "assistant", "tool_calls": 3}, "tool_calls"),
        ({"role": "assistant", "tool_calls": ["x"]}, r"tool_calls\[0\]"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, "function"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "function"),
        ({"role": "assistant", "tool_calls": [{"id": ["c"], "function": {"name": "f"}}]}, "id"),
        ({"role": "tool", "content": "4", "tool_call_id": 4}, "tool_call_id"),
        (user("\ud83d"), "surrogates"),
        (user("4") | {"more": 2**64}, "ints"),
        (user("4") | {"more": object()}, "not data"),
        (user("4") | {"content": [{"type": "text", "text": "4", "more": nested(32)}]}, "nested too deeply"),
        (user("4") | {"content": [{"type": "text", "text": "4", "more": nested(900)}]}, "nested too deeply"),
    ],
)
def test_what_could_not_be_compared_or_recorded_is_refused_with_its_place(message: Any, said: str) -> None:
    with pytest.raises(MessageError, match=said):
        check_recordable([user("2+2?"), message])
