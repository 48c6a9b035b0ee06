"""OpenAI's responses: items as messages, what is refused, and the form of answers."""

from typing import Any

import pytest

from services.sessions.session_api.responses_bodies import RESPONSES
from shared.serving.json_body import BodyError
from tests.sessions.scripted import assistant, call, tool, user
from tests.sessions.session_api.translated import answered, asked, events, request_of

pytestmark = pytest.mark.unit

SYSTEM = {"role": "system", "content": "Be brief."}
TOOL: dict[str, Any] = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}}


def messages_of(*items: dict[str, Any], **more: Any) -> Any:
    return asked(RESPONSES, {"input": [*items], **more}).messages


def item_of_call(name: str, arguments: str, call_id: str = "call-0", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id, **more}


def item_of_result(text: Any, call_id: str = "call-0") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def test_text_and_instructions_are_a_users_and_a_system_message() -> None:
    turn = asked(RESPONSES, {"input": "2+2?", "instructions": "Be brief.", "max_output_tokens": 5, "seed": 3})
    assert (turn.messages, turn.max_tokens, turn.seed) == ([SYSTEM, user("2+2?")], 5, 3)
    assert asked(RESPONSES, {"input": "2+2?", "instructions": ""}).messages == [user("2+2?")], "as without any"


def test_items_of_one_turn_are_one_assistant_message() -> None:
    said: dict[str, Any] = {
        "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "Let me add.", "annotations": []}],
    }  # fmt: skip
    assert messages_of(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
        said,
        item_of_call("add", '{"a":2}', id="fc_1", status="completed"),
        item_of_call("add", '{"a":3}', "call-1"),
        item_of_result("4"),
        item_of_result([{"type": "input_text", "text": "5"}], "call-1"),
        item_of_call("add", "{}", "call-2"),
        item_of_result("0", "call-2"),
        {"role": "assistant", "content": "Done."},
        user("Sure?"),
    ) == [
        SYSTEM,
        user("2+2?"),
        assistant("Let me add.", call("add", '{"a":2}'), call("add", '{"a":3}', "call-1")),
        tool("4"),
        tool("5", "call-1"),
        assistant("", call("add", "{}", "call-2")),
        tool("0", "call-2"),
        assistant("Done."),
        user("Sure?"),
    ]


def test_several_texts_of_a_message_stay_apart_for_the_chat_template_to_join() -> None:
    two = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    (message,) = messages_of({"role": "user", "content": two})
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_a_tool_is_shown_as_chat_completions_show_it() -> None:
    turn = asked(RESPONSES, {"input": "2+2?", "tools": [{**TOOL, "strict": True}], "tool_choice": "required"})
    function = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    assert turn.tools == [{"type": "function", "function": function}]
    assert asked(RESPONSES, {"input": "2+2?", "tools": [TOOL], "tool_choice": "none"}).tools == []


def test_a_request_after_a_response_has_its_conversation_first() -> None:
    earlier = [SYSTEM, user("2+2?"), assistant("4")]
    after = {"previous_response_id": "resp_s-0", "input": "Sure?"}
    assert asked(RESPONSES, after, **{"s-0": earlier}).messages == [*earlier, user("Sure?")]
    new = asked(RESPONSES, {**after, "instructions": "Be long."}, **{"s-0": earlier}).messages
    assert new == [{"role": "system", "content": "Be long."}, *earlier[1:], user("Sure?")]
    with pytest.raises(BodyError):
        asked(RESPONSES, after)


def test_options_that_only_steer_the_sampling_are_ignored_because_the_runs_are_used() -> None:
    ignored: dict[str, Any] = {
        "model": "gpt", "temperature": 0.1, "store": False, "parallel_tool_calls": False, "truncation": "auto",
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "high"}, "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "top_logprobs": 0, "background": False,
    }  # fmt: skip
    assert asked(RESPONSES, {"input": "2+2?", **ignored}) == asked(RESPONSES, {"input": "2+2?"})


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("text", {"format": {"type": "json_schema", "name": "a", "schema": {}}}, "text.format"),
        ("include", ["message.output_text.logprobs"], "include of logprobs"),
        ("top_logprobs", 3, "top_logprobs"),
        ("background", True, "background"),
        ("conversation", "conv_1", "conversation"),
        ("prompt", {"id": "pmpt_1"}, "prompt"),
    ],
)
def test_options_that_promise_another_form_of_answer_are_refused_by_name(option: str, value: Any, named: str) -> None:
    with pytest.raises(BodyError, match=f"does not support {named}") as refused:
        asked(RESPONSES, {"input": "2+2?", option: value})
    assert refused.value.status == 400


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     r"does not support input\[0\].content\[0\] of the type 'input_image'"),
    ({"input": [user("a"), {"type": "reasoning", "id": "rs_1", "summary": [{}]}]},
     r"input\[1\] of the type 'reasoning', only of the types message, function_call, function_call_output"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
    ({"input": [{"type": ["message"], "role": "user", "content": "a"}]}, "is not a string"),
    ({"input": "a", "tools": [TOOL, {"type": "web_search"}]}, r"tools\[1\] of the type 'web_search'"),
    ({"input": [item_of_call("add", "{}"), item_of_result([{"type": "input_file", "file_id": "f"}])]},
     r"input\[1\].output\[0\] of the type 'input_file'"),
    ({"input": [{"role": "robot", "content": "a"}]}, r"input\[0\] is not what this route takes: .*robot"),
    ({"input": [{"type": "function_call", "name": "add"}]}, r"input\[0\] .*missing required field `call_id`"),
    ({"input": []}, "length >= 1"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ({}, "missing required field `input`"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "says"), REFUSED)
def test_content_that_a_turn_cannot_have_is_refused_with_its_place(body: dict[str, Any], says: str) -> None:
    with pytest.raises(BodyError, match=says) as refused:
        asked(RESPONSES, body)
    assert refused.value.status == 400


def test_an_answer_has_openais_form() -> None:
    asking = {"input": "2+2?", "tools": [TOOL], "instructions": "Be brief."}
    turn = answered(assistant("So:", call("add", '{"a": 1}'), call("add", "{}", "call-1")))
    answer = RESPONSES.answer(request_of(RESPONSES, asking), turn)
    assert (answer["id"], answer["object"], answer["status"]) == ("resp_7-0", "response", "completed")
    said, first, second = answer["output"]
    assert (said["role"], said["content"][0]["text"]) == ("assistant", "So:")
    assert (first["type"], first["call_id"], first["name"], first["arguments"]) == (
        "function_call",
        "call-0",
        "add",
        '{"a": 1}',
    )
    assert second["call_id"] == "call-1"
    assert len({said["id"], first["id"], second["id"]}) == 3
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (10, 3)
    # A large request would make a larger answer.
    assert (answer["tools"], answer["instructions"]) == ([], None)


def test_an_answer_has_a_message_unless_it_only_calls() -> None:
    for message, kinds in (
        (assistant(""), ["message"]),
        (assistant("\n", call("add", "{}")), ["function_call"]),
        ({"role": "assistant", "content": None}, ["message"]),
    ):
        answer = RESPONSES.answer(request_of(RESPONSES, {"input": "a"}), answered(message))
        assert [item["type"] for item in answer["output"]] == kinds


def test_a_turn_that_was_cut_is_incomplete() -> None:
    turn = answered(assistant("so"), finish_reason="length")
    answer = RESPONSES.answer(request_of(RESPONSES, {"input": "a"}), turn)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert events(RESPONSES, {"input": "a"}, turn)[-1][0] == "response.incomplete"


def test_a_streamed_answer_builds_the_same_answer() -> None:
    turn = answered(assistant("Four", call("add", "{}")))
    found = events(RESPONSES, {"input": "a"}, turn)
    assert [name.removeprefix("response.") for name, _ in found] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [data["sequence_number"] for _, data in found] == [*range(13)]
    assert all(data["type"] == name for name, data in found)
    assert found[0][1]["response"]["output"] == []
    whole = RESPONSES.answer(request_of(RESPONSES, {"input": "a"}), turn)
    assert found[-1][1]["response"] == whole
    assert [data["item"] for name, data in found if name == "response.output_item.done"] == whole["output"]
