"""Messages as text: content first, then one line for each tool call."""

import pytest

from shared.chat_text import chat_text

pytestmark = pytest.mark.unit


def test_a_message_is_its_content_and_its_tool_calls() -> None:
    as_sampled = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    as_in_trl = {"function": {"name": "now", "arguments": {"zone": "UTC"}}}
    assert chat_text({"role": "tool", "content": "42"}) == "42"
    assert chat_text({"role": "assistant", "content": "I look.", "tool_calls": [as_sampled, as_in_trl]}) == (
        'I look.\nadd({"a": 1})\nnow({"zone": "UTC"})'
    )
    assert chat_text({"role": "assistant", "content": None, "tool_calls": [as_sampled]}) == 'add({"a": 1})'
    assert chat_text({"role": "assistant", "content": "", "tool_calls": None}) == ""


def test_of_content_in_parts_the_texts_count() -> None:
    picture = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    parts = [
        {"type": "text", "text": "What is"},
        picture,
        {"type": "text", "text": "in it?"},
        "Say it.",
        {"text": None},
    ]
    assert chat_text({"role": "user", "content": parts}) == "What is\nin it?\nSay it."
    assert chat_text({"role": "user", "content": [picture]}) == ""
