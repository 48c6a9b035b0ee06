"""Which messages count as the sampled ones after a client has parsed and written them again."""

import pytest

from services.sessions.recording.message_match import comparable
from shared.turns import ChatMessage
from tests.own_time import bounded_time
from tests.sessions.scripted import assistant, call, user

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
        | {"content": [{"type": "text", "text": "Let me see."}]},
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
        ("", "{}", True),
        ("", '{"a": 1}', False),
    ],
)
def test_arguments_that_are_not_json_are_compared_as_text(recorded: str, given: str, is_same: bool) -> None:
    assert comes_back(assistant("", call("f", recorded)), assistant("", call("f", given))) is is_same


@pytest.mark.parametrize(
    ("content", "is_same"),
    [
        (None, False),
        ("Let me\nsee.", True),
        ([{"type": "text", "text": "Let me"}, {"type": "text", "text": "see."}], True),  # as parts are rendered
        ([{"type": "text", "text": "Let me "}, {"type": "text", "text": "see."}], False),
        ([{"type": "text", "text": "Let me\nsee."}, {"type": "refusal", "refusal": "no"}], False),
    ],
)
def test_content_is_compared_as_it_is_rendered(content: object, is_same: bool) -> None:
    assert comes_back(assistant("Let me\nsee."), {"role": "assistant", "content": content}) is is_same


def test_no_content_is_empty_content() -> None:
    assert comes_back(assistant(""), {"role": "assistant", "content": None, "tool_calls": None})


def test_huge_arguments_are_compared_as_text_and_hold_nothing_up() -> None:
    huge = "[" + "[]," * 2_600_000 + "1]"
    with bounded_time(2.0):
        assert comes_back(assistant("", call("f", huge)), assistant("", call("f", f" {huge} ")))
        assert not comes_back(assistant("", call("f", huge)), assistant("", call("f", f" {huge}\n,")))
