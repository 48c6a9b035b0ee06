"""OpenAI's chat completions: what is honoured, what is refused, and the form of answers."""

from typing import Any

import pytest

from services.sessions.session_api.chat_bodies import CHAT_COMPLETIONS, ChatRequest
from services.sessions.session_api.session_routes import RewardReport
from services.sessions.session_api.turn_protocol import decode
from shared.serving.json_body import BodyError
from tests.sessions.scripted import assistant, call, user
from tests.sessions.session_api.translated import answered, asked, events, request_of

pytestmark = pytest.mark.unit

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {}}}


def body(**more: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [user("2+2?")], **more}


def test_options_that_only_steer_the_sampling_are_ignored_because_the_runs_are_used() -> None:
    turn = asked(
        CHAT_COMPLETIONS,
        body(tools=[TOOL], tool_choice="required", temperature=0, top_p=0.1, stop=["Observation:"], n=1, user="me",
             parallel_tool_calls=False, response_format={"type": "text"}, stream=False),
    )  # fmt: skip
    assert (turn.messages, turn.tools, turn.max_tokens) == ([user("2+2?")], [TOOL], 0)
    assert not turn.is_streamed


def test_the_limit_of_tokens_is_honoured_under_both_names() -> None:
    assert asked(CHAT_COMPLETIONS, body(max_tokens=5)).max_tokens == 5
    assert asked(CHAT_COMPLETIONS, body(max_completion_tokens=6)).max_tokens == 6
    assert asked(CHAT_COMPLETIONS, body(max_tokens=None)).max_tokens == 0


def test_a_request_that_must_not_call_tools_shows_none() -> None:
    assert asked(CHAT_COMPLETIONS, body(tools=[TOOL], tool_choice="none")).tools == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("n", 2),
        ("logprobs", True),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}),
        ("functions", [{"name": "add"}]),
        ("function_call", "auto"),
    ],
)
def test_options_that_promise_another_form_of_answer_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(BodyError, match=f"does not support {option}") as refused:
        asked(CHAT_COMPLETIONS, body(**{option: value}))
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (b"{", "not JSON"),
        (b"[]", "Expected `object`"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": ["hello"]}', "messages"),
        (b'{"messages": [{"role": "user"}], "max_tokens": 0}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": NaN}]}', "not JSON"),
    ],
)
def test_a_malformed_request_is_a_sentence_with_the_place(wrong: bytes, says: str) -> None:
    with pytest.raises(BodyError) as refused:
        decode(wrong, ChatRequest)
    assert refused.value.status == 400
    assert says in refused.value.detail


def test_a_reward_is_a_finite_number() -> None:
    assert decode(b'{"reward": 1}', RewardReport).reward == 1.0
    for wrong in (b'{"reward": 1e999}', b'{"reward": "1"}', b'{"reward": null}', b"{}", b"1"):
        with pytest.raises(BodyError):
            decode(wrong, RewardReport)


def test_an_answer_has_openais_form() -> None:
    turn = answered(assistant("", call("add", '{"a": 1}')))
    answer = CHAT_COMPLETIONS.answer(request_of(CHAT_COMPLETIONS, body()), turn)
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [call("add", '{"a": 1}')]
    assert answer["usage"] == {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}


def test_a_turn_that_was_cut_says_so() -> None:
    turn = answered(assistant("so"), finish_reason="length")
    answer = CHAT_COMPLETIONS.answer(request_of(CHAT_COMPLETIONS, body()), turn)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_streamed_answer_is_the_message_then_its_end_then_the_usage() -> None:
    turn = answered(assistant("Four", call("add", "{}")))
    asking = body(stream=True, stream_options={"include_usage": True})
    assert asked(CHAT_COMPLETIONS, asking).is_streamed
    (_, message), (_, end), (_, usage), done = events(CHAT_COMPLETIONS, asking, turn)
    assert message["object"] == "chat.completion.chunk"
    assert message["choices"][0]["delta"]["content"] == "Four"
    assert message["choices"][0]["delta"]["tool_calls"] == [{"index": 0, **call("add", "{}")}]
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "tool_calls")
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 13)
    assert done == ("", "[DONE]")
    assert len(events(CHAT_COMPLETIONS, body(stream=True), turn)) == 3
