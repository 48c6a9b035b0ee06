"""An assistant message is recognised when it comes back, by whichever protocol it went out and comes back."""

import itertools
from typing import Any

import pytest

from services.sessions.recording.message_match import comparable
from services.sessions.session_api.chat_bodies import CHAT_COMPLETIONS
from services.sessions.session_api.messages_bodies import MESSAGES
from services.sessions.session_api.responses_bodies import RESPONSES
from services.sessions.session_api.turn_protocol import decode
from shared.serving.json_body import BodyError
from shared.turns import ChatMessage
from tests.sessions.scripted import assistant, call, user
from tests.sessions.session_api.translated import answered, asked, request_of

pytestmark = pytest.mark.unit

PROTOCOLS: dict[str, Any] = {"chat": CHAT_COMPLETIONS, "responses": RESPONSES, "messages": MESSAGES}
SAMPLED: dict[str, ChatMessage] = {
    "text": assistant("It is 4.\n"),
    "an empty text": assistant(""),
    "no text": {"role": "assistant", "content": None},
    "a call": assistant("", call("add", '{"a": 1, "b": [true, null]}')),
    "two calls": assistant("", call("add", "{}"), call("add", '{"a":1}', "call-1")),
    "text, newline, call": assistant("Let me see.\n", call("add", '{"a":1}')),
    "a newline and a call": assistant("\n", call("add", '{"a":1}')),
    "escapes and numbers": assistant("", call("add", '{"a": "caf\\u00e9", "b": 1.50, "c": 1180591620717411303424}')),
    "no arguments": assistant("", call("add", "")),
    "arguments that are a list": assistant("", call("add", "[1, 2]")),
    "arguments that are a text": assistant("", call("add", '"1"')),
    "arguments that are cut": assistant("", call("add", '{"a": "')),
    "arguments of half a surrogate pair": assistant("", call("add", '{"a": "\\ud800"}')),
    "reasoning": assistant("4", reasoning_content="2 and 2 is 4."),
}


def sent_back(protocol: str, message: ChatMessage) -> dict[str, Any]:
    """Return the body with which a client asks for the next turn, with the answer as it got it."""
    first: dict[str, Any] = {
        "chat": {"messages": [user("2+2?")]},
        "responses": {"input": [user("2+2?")]},
        "messages": {"messages": [user("2+2?")]},
    }[protocol]
    answer = PROTOCOLS[protocol].answer(request_of(PROTOCOLS[protocol], first), answered(message))
    if protocol == "chat":
        return {"messages": [user("2+2?"), answer["choices"][0]["message"], user("Sure?")]}
    if protocol == "responses":
        return {"input": [user("2+2?"), *answer["output"], user("Sure?")]}
    return {"messages": [user("2+2?"), {"role": "assistant", "content": answer["content"]}, user("Sure?")]}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("message", SAMPLED.values(), ids=SAMPLED)
def test_a_sampled_message_comes_back_equal(protocol: str, message: ChatMessage) -> None:
    first, said, last = asked(PROTOCOLS[protocol], sent_back(protocol, message)).messages
    assert (first, last) == (user("2+2?"), user("Sure?"))
    assert comparable(message).comes_back_as(comparable(said))


def test_a_developers_message_is_the_systems_because_templates_leave_out_roles_that_they_do_not_know() -> None:
    given = [{"role": "developer", "content": "Be brief."}, user("2+2?")]
    wanted = [{"role": "system", "content": "Be brief."}, user("2+2?")]
    assert asked(CHAT_COMPLETIONS, {"messages": given}).messages == wanted
    assert asked(RESPONSES, {"input": given}).messages == wanted


@pytest.mark.parametrize("protocol", ["responses", "messages"])
def test_another_message_does_not(protocol: str) -> None:
    for one, other in itertools.permutations(SAMPLED.values(), 2):
        alike = comparable(one).comes_back_as(comparable(other))
        _, said, _ = asked(PROTOCOLS[protocol], sent_back(protocol, other)).messages
        assert comparable(one).comes_back_as(comparable(said)) == alike


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_a_body_is_refused_before_it_is_too_deep_to_be_encoded_again(protocol: Any) -> None:
    def body(levels: int) -> bytes:
        return b'{"messages":[{"role":"user","content":"a"}],"input":"a","tool_choice":{"type":"a","a":%s}}' % (
            b"[" * levels + b"]" * levels
        )

    decode(body(98), protocol.request)
    for levels in (99, 900):
        with pytest.raises(BodyError, match="nested deeper than 100 levels"):
            decode(body(levels), protocol.request)


@pytest.mark.parametrize("kind", [[1e-300] * 3, {"a": 1}, 5, True])
def test_a_type_that_is_not_a_string_is_named_as_such(kind: object) -> None:
    with pytest.raises(BodyError, match=r"The type of input\[0\] is not a string"):
        asked(RESPONSES, {"input": [{"type": kind, "role": "user", "content": "a"}]})
