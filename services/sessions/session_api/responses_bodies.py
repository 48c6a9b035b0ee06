"""Translates requests and answers of OpenAI's Responses API for sessions. Pure.

    instructions, input                         -->        chat messages
    message, function_call, function_call       <-->       one assistant message with two calls
    function_call_output                        -->        a tool message

An answer is not stored: the session's recording has it, so ``previous_response_id`` can name any turn of the session.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.sessions.session_api.turn_protocol import (
    MODEL,
    AnsweredTurn,
    AskedTurn,
    ConversationOf,
    Positive,
    TurnProtocol,
    function_call,
    function_tool,
    one_of,
    refuse_options,
    server_sent_event,
    text_content,
)
from shared.turns import ChatMessage

_ID = "resp_"
_TEXT = ("input_text", "output_text")


class TextFormat(msgspec.Struct):
    """The format of the answer's text. Only the type ``text`` is supported."""

    type: str = "text"


class TextOptions(msgspec.Struct):
    """The options for the answer's text. Only ``format`` is read."""

    format: TextFormat | None = None


class ResponsesRequest(msgspec.Struct):
    """The fields of OpenAI's responses request that a session reads."""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: Positive | None = None
    seed: int | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class _FunctionCall(msgspec.Struct):
    call_id: str
    name: str
    arguments: str


class _FunctionCallOutput(msgspec.Struct):
    call_id: str
    output: str | list[dict[str, Any]]


class _Tool(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


_ITEMS: dict[str, type[_Message | _FunctionCall | _FunctionCallOutput]] = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionCallOutput,
}


def asked(request: ResponsesRequest, conversation_of: ConversationOf) -> AskedTurn:
    """Translate a Responses request into a request for a turn.

    Raises:
        BodyError: An option asks for an answer that a session cannot give, an item is neither text nor a tool call nor
            its output, or the session does not have the previous response.
    """
    refuse_options(
        {
            "text.format": (
                request.text is not None and request.text.format is not None and request.text.format.type != "text"
            ),
            "include of logprobs": "message.output_text.logprobs" in (request.include or ()),
            "top_logprobs": bool(request.top_logprobs),
            "background": bool(request.background),
            "conversation": request.conversation is not None,
            "prompt": request.prompt is not None,
        }
    )
    tools = [
        one_of(tool, {"function": _Tool}, place=f"tools[{index}]") for index, tool in enumerate(request.tools or ())
    ]
    return AskedTurn(
        messages=_conversation(request, conversation_of),
        tools=[function_tool(tool.name, tool.description, tool.parameters) for tool in tools]
        if request.tool_choice != "none"
        else [],
        max_tokens=request.max_output_tokens or 0,
        seed=request.seed,
        is_streamed=bool(request.stream),
    )


def answer(request: ResponsesRequest, answered: AnsweredTurn) -> dict[str, Any]:
    """Return a turn as the body of a response that is not streamed."""
    num_prompt, num_sampled = answered.num_prompt_tokens, answered.num_sampled_tokens
    return {
        "id": f"{_ID}{answered.answer_id}",
        "object": "response",
        "created_at": int(answered.turn.ended_at_s),
        "model": MODEL,
        "status": "incomplete" if answered.is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if answered.is_cut else None,
        "error": None,
        "output": _output(answered),
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_sampled,
        },
        # A client knows what it asked for. A stream would repeat it three times, as often as it is asked for.
        "instructions": None,
        "previous_response_id": request.previous_response_id,
        "max_output_tokens": request.max_output_tokens,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "metadata": {},
    }


def events(request: ResponsesRequest, answered: AnsweredTurn) -> Iterator[str]:
    """Yield the events of a streamed answer: each item of the output is added, has one delta, and is done."""
    whole = answer(request, answered)
    begun: dict[str, Any] = whole | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    steps: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        *(step for index, item in enumerate(whole["output"]) for step in _steps(index, item)),
        (f"response.{whole['status']}", {"response": whole}),
    ]
    for number, (name, data) in enumerate(steps):
        yield server_sent_event({"type": name, "sequence_number": number, **data}, name=name)


RESPONSES = TurnProtocol(ResponsesRequest, asked, answer, events)


def _conversation(request: ResponsesRequest, conversation_of: ConversationOf) -> list[ChatMessage]:
    """Return the conversation up to the previous response, followed by the messages of this request.

    New instructions replace the system message at the beginning of the conversation.
    """
    earlier: list[ChatMessage] = []
    if request.previous_response_id is not None:
        earlier = conversation_of(request.previous_response_id.removeprefix(_ID))
    if request.instructions:
        if earlier and earlier[0]["role"] == "system":
            del earlier[0]
        earlier.insert(0, {"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*earlier, {"role": "user", "content": request.input}]
    return [*earlier, *_messages(request.input)]


def _messages(items: list[dict[str, Any]]) -> list[ChatMessage]:
    """Convert a request's input items to chat messages. Tool calls become part of the assistant message before them."""
    messages: list[ChatMessage] = []
    for index, given in enumerate(items):
        place = f"input[{index}]"
        match one_of(given, _ITEMS, place=place, default="message"):
            case _Message(role=role, content=content):
                content = text_content(content, types=_TEXT, place=f"{place}.content")
                messages.append({"role": "system" if role == "developer" else role, "content": content})
            case _FunctionCall(call_id=call_id, name=name, arguments=arguments):
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(function_call(call_id, name, arguments))
            case _FunctionCallOutput(call_id=call_id, output=output):
                content = text_content(output, types=_TEXT, place=f"{place}.output")
                messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
    return messages


def _output(answered: AnsweredTurn) -> list[dict[str, Any]]:
    """Return a turn's text and tool calls as output items of a response."""
    status = "incomplete" if answered.is_cut else "completed"
    items: list[dict[str, Any]] = []
    if answered.shows_text:
        text: dict[str, Any] = {"type": "output_text", "text": answered.text, "annotations": [], "logprobs": []}
        head = {"id": f"msg_{answered.answer_id}", "type": "message", "role": "assistant", "status": status}
        items.append({**head, "content": [text]})
    for index, call in enumerate(answered.calls):
        items.append(
            {
                "id": f"fc_{answered.answer_id}-{index}",
                "type": "function_call",
                "status": "completed",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
        )
    return items


def _steps(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and data of each stream event for one output item."""
    whole = {"output_index": index, "item": item}
    inside = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "message":
        yield "response.output_item.added", {**whole, "item": item | {"status": "in_progress", "content": []}}
        (part,) = item["content"]
        inside["content_index"] = 0
        yield "response.content_part.added", {**inside, "part": part | {"text": ""}}
        yield "response.output_text.delta", {**inside, "delta": part["text"], "logprobs": []}
        yield "response.output_text.done", {**inside, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**inside, "part": part}
    else:
        yield "response.output_item.added", {**whole, "item": item | {"status": "in_progress", "arguments": ""}}
        yield "response.function_call_arguments.delta", {**inside, "delta": item["arguments"]}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", {**inside, **done}
    yield "response.output_item.done", whole
