"""OpenAI's chat completions: what is honoured, what is refused, and the form of answers."""

from typing import Any

import msgspec
import pytest

from services.sessions.session_api.chat_bodies import chunks, completion, decode_chat_request, decode_reward
from shared.serving.json_body import BodyError
from tests.sessions.scripted import assistant, call, sampled, user

pytestmark = pytest.mark.unit

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {}}}


def body(**more: Any) -> bytes:
    return msgspec.json.encode({"model": "any", "messages": [user("2+2?")], **more})


def test_options_that_only_steer_the_sampling_are_ignored_because_the_runs_are_used() -> None:
    request = decode_chat_request(
        body(tools=[TOOL], tool_choice="required", temperature=0, top_p=0.1, stop=["Observation:"], n=1, user="me",
             parallel_tool_calls=False, response_format={"type": "text"}, stream=False)
    )  # fmt: skip
    assert request.messages == [user("2+2?")]
    assert request.shown_tools == [TOOL]
    assert request.most_tokens == 0


def test_the_limit_of_tokens_is_honoured_under_both_names() -> None:
    assert decode_chat_request(body(max_tokens=5)).most_tokens == 5
    assert decode_chat_request(body(max_completion_tokens=6)).most_tokens == 6
    assert decode_chat_request(body(max_tokens=None)).most_tokens == 0


def test_a_request_that_must_not_call_tools_shows_none() -> None:
    assert decode_chat_request(body(tools=[TOOL], tool_choice="none")).shown_tools == []


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
        decode_chat_request(body(**{option: value}))
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (b"{", "not JSON"),
        (b"[]", "not a request"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": ["hello"]}', "messages"),
        (b'{"messages": [{"role": "user"}], "max_tokens": 0}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": NaN}]}', "not JSON"),
    ],
)
def test_a_malformed_request_is_a_sentence_with_the_place(wrong: bytes, says: str) -> None:
    with pytest.raises(BodyError) as refused:
        decode_chat_request(wrong)
    assert refused.value.status == 400
    assert says in refused.value.detail


def test_a_reward_is_a_finite_number() -> None:
    assert decode_reward(b'{"reward": 1}') == 1.0
    for wrong in (b'{"reward": 1e999}', b'{"reward": "1"}', b'{"reward": null}', b"{}", b"1"):
        with pytest.raises(BodyError):
            decode_reward(wrong)


def test_an_answer_has_openais_form() -> None:
    turn = sampled(assistant("", call("add", '{"a": 1}')), token_ids=[1, 2, 3])
    answer = completion("7-0", turn, num_prompt_tokens=10)
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [call("add", '{"a": 1}')]
    assert answer["usage"] == {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}


def test_a_turn_that_was_cut_says_so() -> None:
    turn = sampled(assistant("so"), finish_reason="length")
    assert completion("7-0", turn, num_prompt_tokens=1)["choices"][0]["finish_reason"] == "length"


def test_a_streamed_answer_is_the_message_then_its_end_then_the_usage() -> None:
    turn = sampled(assistant("Four", call("add", "{}")))
    message, end, usage = chunks("7-0", turn, num_prompt_tokens=3, include_usage=True)
    assert message["object"] == "chat.completion.chunk"
    assert message["choices"][0]["delta"]["content"] == "Four"
    assert message["choices"][0]["delta"]["tool_calls"] == [{"index": 0, **call("add", "{}")}]
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "tool_calls")
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 5)
    assert len([*chunks("7-0", turn, num_prompt_tokens=3, include_usage=False)]) == 2
