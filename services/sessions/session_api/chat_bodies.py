"""Translates requests and answers of OpenAI's chat completions for sessions. Pure.

Messages and tools have this protocol's form everywhere in headrace, so they are not changed. Only the role
``developer``, which many chat templates ignore, becomes ``system``, as in responses_bodies.py.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.sessions.session_api.turn_protocol import (
    MODEL,
    AnsweredTurn,
    AskedTurn,
    ConversationOf,
    Positive,
    TurnProtocol,
    refuse_options,
    server_sent_event,
)
from shared.turns import ChatMessage


class StreamOptions(msgspec.Struct):
    """Options for a streamed answer. ``include_usage`` adds an event with the numbers of tokens."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct):
    """The format of the answer. Only the type ``text`` is supported."""

    type: str = "text"


class ChatRequest(msgspec.Struct):
    """The fields of OpenAI's chat completions request that a session reads."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    logprobs: bool | None = None
    response_format: ResponseFormat | None = None
    functions: Any = None
    function_call: Any = None


def asked(request: ChatRequest, _: ConversationOf) -> AskedTurn:
    """Translate a chat completions request into a request for a turn.

    Raises:
        BodyError: An option asks for an answer that a session cannot give, such as several choices or logprobs.
    """
    refuse_options(
        {
            "n": request.n not in (None, 1),
            "logprobs": bool(request.logprobs),
            "response_format": request.response_format is not None and request.response_format.type != "text",
            "functions": bool(request.functions),
            "function_call": request.function_call not in (None, "none"),
        }
    )
    return AskedTurn(
        messages=[_asked_message(message) for message in request.messages],
        tools=[] if request.tool_choice == "none" else request.tools or [],
        max_tokens=request.max_completion_tokens or request.max_tokens or 0,
        seed=request.seed,
        is_streamed=bool(request.stream),
    )


def answer(_: ChatRequest, answered: AnsweredTurn) -> dict[str, Any]:
    """Return a turn as the body of a chat completion that is not streamed."""
    choice = {"index": 0, "message": _message(answered), "finish_reason": _finish_reason(answered), "logprobs": None}
    return _head(answered, "chat.completion") | {"choices": [choice], "usage": _usage(answered)}


def events(request: ChatRequest, answered: AnsweredTurn) -> Iterator[str]:
    """Yield the events of a streamed answer: the whole message, its finish reason and, if requested, its usage."""
    wants_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    head = _head(answered, "chat.completion.chunk") | ({"usage": None} if wants_usage else {})
    message = _message(answered)
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
    for delta, reason in ((message, None), ({}, _finish_reason(answered))):
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        yield server_sent_event(head | {"choices": [choice]})
    if wants_usage:
        yield server_sent_event(head | {"choices": [], "usage": _usage(answered)})
    yield "data: [DONE]\n\n"


def models() -> dict[str, Any]:
    """Return the body of OpenAI's list of models, with the one model that every session has: the policy."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "headrace"}]}


CHAT_COMPLETIONS = TurnProtocol(ChatRequest, asked, answer, events)


def _asked_message(message: ChatMessage) -> ChatMessage:
    return message | {"role": "system"} if message.get("role") == "developer" else message


def _head(answered: AnsweredTurn, kind: str) -> dict[str, Any]:
    created = int(answered.turn.ended_at_s)
    return {"id": f"chatcmpl-{answered.answer_id}", "object": kind, "created": created, "model": MODEL}


def _message(answered: AnsweredTurn) -> dict[str, Any]:
    message = {"role": "assistant", "refusal": None, **answered.turn.message}
    if answered.calls and not answered.text:
        message["content"] = None
    return message


def _finish_reason(answered: AnsweredTurn) -> str:
    return "tool_calls" if answered.calls and not answered.is_cut else answered.turn.finish_reason


def _usage(answered: AnsweredTurn) -> dict[str, int]:
    return {
        "prompt_tokens": answered.num_prompt_tokens,
        "completion_tokens": answered.num_sampled_tokens,
        "total_tokens": answered.num_prompt_tokens + answered.num_sampled_tokens,
    }
