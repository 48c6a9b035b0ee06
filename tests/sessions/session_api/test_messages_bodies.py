"""Anthropic's messages: blocks as messages, what is refused, and the form of answers."""

from typing import Any

import pytest

from services.sessions.session_api.messages_bodies import MESSAGES
from shared.serving.json_body import BodyError
from tests.sessions.scripted import assistant, call, tool, user
from tests.sessions.session_api.translated import answered, asked, events, request_of

pytestmark = pytest.mark.unit

TOOL: dict[str, Any] = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
MARK = {"cache_control": {"type": "ephemeral"}}


def body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "any", "max_tokens": 9, "messages": [*messages] or [user("2+2?")], **more}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def use(name: str, given: Any, call_id: str = "call-0") -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def result(said: Any, call_id: str = "call-0", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": said, **more}


def answer_to(message: dict[str, Any], **more: Any) -> dict[str, Any]:
    return MESSAGES.answer(request_of(MESSAGES, body()), answered(message, **more))


def test_the_system_prompt_is_the_first_message() -> None:
    system = {"role": "system", "content": "Be brief."}
    turn = asked(MESSAGES, body(system="Be brief.", seed=3))
    assert (turn.messages, turn.max_tokens, turn.seed) == ([system, user("2+2?")], 9, 3)
    assert asked(MESSAGES, body(system=[text("Be brief.", **MARK)])).messages == turn.messages
    assert asked(MESSAGES, body(system=[])).messages == [user("2+2?")]


def test_a_block_that_differs_in_each_request_of_claude_code_is_no_part_of_the_conversation() -> None:
    first, second = (
        asked(MESSAGES, body(system=[text(f"x-anthropic-billing-header: cch={mark};"), text("Be brief.")]))
        for mark in ("1a", "2b")
    )
    assert first == second


def test_blocks_become_messages_in_their_order() -> None:
    assert asked(
        MESSAGES,
        body(
            {"role": "user", "content": [text("2+2?", **MARK)]},
            {"role": "assistant", "content": [text("Let me add."), use("add", {"a": 2}), use("add", {}, "call-1")]},
            {"role": "user", "content": [result("4"), result([text("5")], "call-1", is_error=True), text("Go on.")]},
            {"role": "assistant", "content": [use("add", {"b": "\u00e9"}, "call-2")]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call-2"}]},
            {"role": "assistant", "content": []},
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": []},
        ),
    ).messages == [
        user("2+2?"),
        assistant("Let me add.", call("add", '{"a":2}'), call("add", "{}", "call-1")),
        tool("4"),
        tool("5", "call-1"),
        user("Go on."),
        assistant("", call("add", '{"b":"\u00e9"}', "call-2")),
        tool("", "call-2"),
        assistant(""),
        {"role": "system", "content": "Be brief."},
        user(""),
    ]


def test_several_texts_of_a_message_stay_apart_for_the_chat_template_to_join() -> None:
    (message,) = asked(MESSAGES, body({"role": "user", "content": [text("a"), text("b", **MARK)]})).messages
    assert message == {"role": "user", "content": [text("a"), text("b")]}


def test_a_tool_is_shown_as_chat_completions_show_it() -> None:
    function = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    for shown in (TOOL, {**TOOL, "type": "custom", **MARK}):
        turn = asked(MESSAGES, body(tools=[shown], tool_choice={"type": "any"}))
        assert turn.tools == [{"type": "function", "function": function}]
    assert asked(MESSAGES, body(tools=[TOOL], tool_choice={"type": "none"})).tools == []


def test_options_that_only_steer_the_sampling_are_ignored_because_the_runs_are_used() -> None:
    ignored: dict[str, Any] = {
        "temperature": 0.1, "top_k": 3, "stop_sequences": ["Observation:"], "metadata": {"user_id": "me"},
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}, "stream": False,
    }  # fmt: skip
    assert asked(MESSAGES, body(**ignored)) == asked(MESSAGES, body())


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url", "url": "http://mcp", "name": "m"}]}, "mcp_servers"),
        ({"messages": [user("2+2?"), assistant("It is")]}, "a last message of the assistant"),
    ],
)
def test_options_that_promise_another_form_of_answer_are_refused_by_name(more: dict[str, Any], named: str) -> None:
    with pytest.raises(BodyError, match=f"does not support {named}") as refused:
        asked(MESSAGES, {**body(), **more})
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (body({"role": "user", "content": [text("a"), {"type": "image", "source": {}}]}),
         r"messages\[0\].content\[1\] of the type 'image', only of the types text, tool_result"),
        (body({"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": ""}]}, user("b")),
         r"messages\[0\].content\[0\] of the type 'thinking', only of the types text, tool_use"),
        (body({"role": "user", "content": [text("a"), result([{"type": "image", "source": {}}])]}),
         r"messages\[0\].content\[1\].content\[0\] of the type 'image'"),
        (body({"role": "user", "content": [use("add", {})]}), "of the type 'tool_use', only of the types text, tool_r"),
        (body({"role": "user", "content": [{"text": "a"}]}), "of the type ''"),
        (body(tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}]), r"tools\[1\] of the type 'web_se"),
        (body(tools=[{"name": "add"}]), r"tools\[0\] .*missing required field `input_schema`"),
        (body({"role": "tool", "content": "4"}), "Invalid enum value 'tool'"),
        (body({"role": "user", "content": [result(4)]}),
         r"content\[0\] is not what this route takes"),
        ({"messages": []}, "length >= 1"),
        ({"messages": [user("a")], "max_tokens": 0}, "max_tokens"),
    ],
)  # fmt: skip
def test_content_that_a_turn_cannot_have_is_refused_with_its_place(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(BodyError, match=says) as refused:
        asked(MESSAGES, wrong)
    assert refused.value.status == 400


def test_an_answer_has_anthropics_form() -> None:
    answer = answer_to(assistant("So:", call("add", '{"a": 1}')))
    assert (answer["id"], answer["type"], answer["role"]) == ("msg_7-0", "message", "assistant")
    assert answer["content"] == [text("So:"), use("add", {"a": 1})]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (10, 3)
    assert answer_to(assistant("4"))["stop_reason"] == "end_turn"
    assert answer_to(assistant("so"), finish_reason="length")["stop_reason"] == "max_tokens"


def test_an_answer_has_a_text_unless_it_only_calls() -> None:
    assert answer_to(assistant(""))["content"] == [text("")]
    assert answer_to(assistant("\n", call("add", "")))["content"] == [use("add", {})]


@pytest.mark.parametrize(
    "arguments", ["[1]", "null", '"a"', "1", '{"a":', "{'a': 1}", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}',
                  '{"a": ' + "[" * 2000 + "]" * 2000 + "}"]
)  # fmt: skip
def test_arguments_that_are_no_object_are_shown_as_text(arguments: str) -> None:
    (block,) = answer_to(assistant("", call("add", arguments)))["content"]
    assert block["input"] == arguments


def test_a_streamed_answer_builds_the_same_answer() -> None:
    turn = answered(assistant("Four", call("add", '{"a": 1}')))
    found = events(MESSAGES, body(), turn)
    assert [name for name, _ in found] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert all(data["type"] == name for name, data in found)
    begun = found[0][1]["message"]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 0)
    assert found[1][1] == {"type": "content_block_start", "index": 0, "content_block": text("")}
    assert found[2][1]["delta"] == {"type": "text_delta", "text": "Four"}
    assert found[4][1] == {"type": "content_block_start", "index": 1, "content_block": use("add", {})}
    assert found[5][1]["delta"] == {"type": "input_json_delta", "partial_json": '{"a":1}'}
    assert (found[7][1]["delta"]["stop_reason"], found[7][1]["usage"]["output_tokens"]) == ("tool_use", 3)
