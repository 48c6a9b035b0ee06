"""Which messages count as the recorded ones after a client has parsed and written them again."""

from typing import Any

import pytest

from services.sessions.recording.message_match import comparable
from shared.turns import ChatMessage
from tests.sessions.scripted import assistant, call, tool, user

pytestmark = pytest.mark.unit


def comes_back(recorded: ChatMessage, given: ChatMessage) -> bool:
    return comparable(recorded).comes_back_as(comparable(given))


RECORDED = assistant("Let me see.\n", call("add", '{"a": 1, "b": [true, "caf\\u00e9", 1.50]}'), reasoning="hm")


@pytest.mark.parametrize(
    "given",
    [
        RECORDED,
        assistant("Let me see.", call("add", '{"a": 1, "b": [true, "caf\\u00e9", 1.50]}')),  # reasoning is dropped
        assistant(" Let me see. ", call("add", '{"b":[true,"café",1.5],"a":1}')),
        assistant("Let me see.", call("add", '{"a": 1.0, "b": [true, "café", 1.5]}', call_id=None)),
        assistant("Let me see.", call("add", '{"a": 1, "b": [true, "café", 1.5]}'), name="agent", refusal=None),
        assistant("", call("add", '{"a": 1, "b": [true, "café", 1.5]}'))
        | {"content": [{"type": "text", "text": "Let me "}, {"type": "text", "text": "see."}]},
    ],
)
def test_an_assistant_message_that_was_only_written_differently_is_the_recorded_one(given: ChatMessage) -> None:
    assert comes_back(RECORDED, given)


@pytest.mark.parametrize(
    "given",
    [
        user("Let me see."),
        assistant("Let me see."),
        assistant("Let me look.", call("add", '{"a": 1, "b": [true, "café", 1.5]}')),
        assistant("Let me see.", call("sub", '{"a": 1, "b": [true, "café", 1.5]}')),
        assistant("Let me see.", call("add", '{"a": 2, "b": [true, "café", 1.5]}')),
        assistant("Let me see.", call("add", '{"a": 1, "b": [1, "café", 1.5]}')),  # in Python, True == 1
        assistant("Let me see.", call("add", '{"a": 1, "b": [true, "café", 1.5]}', "call-1")),
        assistant("Let me see.", *[call("add", '{"a": 1, "b": [true, "café", 1.5]}')] * 2),
    ],
)
def test_an_assistant_message_that_was_changed_is_another(given: ChatMessage) -> None:
    assert not comes_back(RECORDED, given)


@pytest.mark.parametrize(
    ("recorded", "given", "is_same"),
    [
        ('{"a": 1', ' {"a": 1 ', True),
        ('{"a": 1', '{"a": 1}', False),
        ("[" * 100_000, "[" * 100_000, True),
        ('{"a": NaN}', '{"a": NaN}', True),  # which is not JSON, so the text is compared
        ("", "", True),
    ],
)
def test_arguments_that_are_not_json_are_compared_as_text(recorded: str, given: str, is_same: bool) -> None:
    assert comes_back(assistant("", call("f", recorded)), assistant("", call("f", given))) is is_same


@pytest.mark.parametrize(
    ("recorded", "given", "is_same"),
    [
        (tool("4"), tool("4\n"), True),
        (tool("4"), {"role": "tool", "content": "4"}, True),
        (tool("4"), tool("4", "call-1"), False),
        (user("a") | {"name": "Ann"}, user("a") | {"name": "Bob"}, False),
        (assistant(""), assistant("") | {"content": None}, True),
    ],
)
def test_messages_of_others(recorded: ChatMessage, given: ChatMessage, is_same: bool) -> None:
    assert comes_back(recorded, given) is is_same


@pytest.mark.parametrize(("other", "is_same"), [("cat", True), ("dog", False)])
def test_images_are_compared(other: str, is_same: bool) -> None:
    def with_image(name: str) -> ChatMessage:
        parts: list[Any] = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": name}}]
        return {"role": "user", "content": parts}

    assert comes_back(with_image("cat"), with_image(other)) is is_same
