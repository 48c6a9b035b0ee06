"""Translates requests and answers of Anthropic's Messages API for sessions. Pure.

    system; a user's text blocks       -->     chat messages
    a user's tool_result blocks        -->     a tool message each, in their places
    the assistant's text and tool_use  <-->    one assistant message with calls

Only the parts of a block that the policy reads are used, because clients move their cache marks from block to block.
"""

import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from services.sessions.session_api.turn_protocol import (
    MODEL,
    AnsweredTurn,
    AskedTurn,
    ConversationOf,
    Positive,
    TextPart,
    TurnProtocol,
    content_of,
    function_call,
    function_tool,
    one_of,
    refuse_options,
    server_sent_event,
    text_content,
)
from shared.message_invariants import is_data
from shared.turns import ChatMessage

_BILLING = "x-anthropic-billing-header"
"""Begins a system block of Claude Code that differs in each request. Each would be another conversation."""


class Message(msgspec.Struct):
    """A message whose content is text or a list of content blocks, as in Anthropic's API."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class OutputConfig(msgspec.Struct):
    """Options for the answer. A request with a ``format`` is refused, because an answer is text."""

    format: Any = None


class ToolChoice(msgspec.Struct):
    """Anthropic's ``tool_choice``. Only the type ``none`` has an effect: the policy is shown no tools."""

    type: str


class MessagesRequest(msgspec.Struct):
    """The fields of Anthropic's messages request that a session reads."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Positive | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    seed: int | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None
    output_format: Any = None
    container: Any = None
    mcp_servers: list[Any] | None = None


class _ToolUse(msgspec.Struct):
    id: str
    name: str
    input: dict[str, Any] | str


class _ToolResult(msgspec.Struct):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None


_Block = TextPart | _ToolUse | _ToolResult
_BLOCKS: dict[str, dict[str, type[_Block]]] = {
    "system": {"text": TextPart},
    "user": {"text": TextPart, "tool_result": _ToolResult},
    "assistant": {"text": TextPart, "tool_use": _ToolUse},
}


def asked(request: MessagesRequest, _: ConversationOf) -> AskedTurn:
    """Translate a Messages request into a request for a turn.

    Raises:
        BodyError: An option asks for an answer that a session cannot give, a block is neither text nor a tool call nor
            its result, or the last message is the assistant's.
    """
    refuse_options({"a last message of the assistant": request.messages[-1].role == "assistant"})
    return counted(request)


def counted(request: MessagesRequest) -> AskedTurn:
    """Translate a Messages request whose tokens are only counted. Its last message may be the assistant's.

    Raises:
        BodyError: As for ``asked``, except for the last message.
    """
    refuse_options(
        {
            "output_config.format": request.output_config is not None and request.output_config.format is not None,
            "output_format": request.output_format is not None,
            "container": request.container is not None,
            "mcp_servers": bool(request.mcp_servers),
        }
    )
    tools = [
        one_of(tool, {"custom": _Tool}, place=f"tools[{index}]", default="custom")
        for index, tool in enumerate(request.tools or ())
    ]
    shows_tools = request.tool_choice is None or request.tool_choice.type != "none"
    return AskedTurn(
        messages=[
            *_system(request.system),
            *(made for index, message in enumerate(request.messages) for made in _chat_messages(index, message)),
        ],
        tools=[function_tool(tool.name, tool.description, tool.input_schema) for tool in tools if shows_tools],
        max_tokens=request.max_tokens or 0,
        seed=request.seed,
        is_streamed=bool(request.stream),
    )


def answer(_: MessagesRequest, answered: AnsweredTurn) -> dict[str, Any]:
    """Return a turn as the body of a message that is not streamed."""
    stop_reason = "max_tokens" if answered.is_cut else "tool_use" if answered.calls else "end_turn"
    return {
        "id": f"msg_{answered.answer_id}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": _blocks(answered),
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": {
            "input_tokens": answered.num_prompt_tokens,
            "output_tokens": answered.num_sampled_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def events(request: MessagesRequest, answered: AnsweredTurn) -> Iterator[str]:
    """Yield the events of a streamed answer: each block is begun, has one delta, and is ended."""
    whole = answer(request, answered)
    begun: dict[str, Any] = whole | {"content": [], "stop_reason": None, "usage": whole["usage"] | {"output_tokens": 0}}
    why = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    steps: list[dict[str, Any]] = [
        {"type": "message_start", "message": begun},
        *(step for index, block in enumerate(whole["content"]) for step in _steps(index, block)),
        {"type": "message_delta", "delta": why, "usage": whole["usage"]},
        {"type": "message_stop"},
    ]
    for data in steps:
        yield server_sent_event(data, name=data["type"])


MESSAGES = TurnProtocol(MessagesRequest, asked, answer, events)


def _system(given: str | list[dict[str, Any]] | None) -> list[ChatMessage]:
    if isinstance(given, list):
        given = [block for block in given if not _is_billing(block.get("text"))]
    content = text_content(given or "", types=("text",), place="system")
    return [{"role": "system", "content": content}] if content else []


def _is_billing(text: Any) -> bool:
    return isinstance(text, str) and text.startswith(_BILLING)


def _chat_messages(index: int, message: Message) -> list[ChatMessage]:
    """Convert a message to chat messages. Each tool result in it becomes a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    place = f"messages[{index}].content"
    blocks = [
        one_of(block, _BLOCKS[message.role], place=f"{place}[{number}]") for number, block in enumerate(message.content)
    ]
    if message.role == "assistant":
        made: ChatMessage = {"role": "assistant", "content": _text_of(blocks)}
        if calls := [_call(block) for block in blocks if isinstance(block, _ToolUse)]:
            made["tool_calls"] = calls
        return [made]
    messages: list[ChatMessage] = []
    numbered = enumerate(blocks)
    for is_result, group in itertools.groupby(numbered, key=lambda block: isinstance(block[1], _ToolResult)):
        same = [*group]
        if is_result:
            messages += [_result(block, f"{place}[{at}]") for at, block in same if isinstance(block, _ToolResult)]
        else:
            messages.append({"role": message.role, "content": _text_of([block for _, block in same])})
    return messages or [{"role": message.role, "content": ""}]


def _text_of(blocks: list[_Block]) -> str | list[dict[str, Any]]:
    return content_of([block.text for block in blocks if isinstance(block, TextPart)])


def _result(block: _ToolResult, place: str) -> ChatMessage:
    content = text_content(block.content or "", types=("text",), place=f"{place}.content")
    return {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}


def _call(block: _ToolUse) -> dict[str, Any]:
    arguments = block.input if isinstance(block.input, str) else msgspec.json.encode(block.input).decode()
    return function_call(block.id, block.name, arguments)


def _blocks(answered: AnsweredTurn) -> list[dict[str, Any]]:
    """Return a turn's text and tool calls as content blocks."""
    text = [{"type": "text", "text": answered.text}] if answered.shows_text else []
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": _input(call["function"]["arguments"]),
        }
        for call in answered.calls
    ]
    return [*text, *calls]


def _input(arguments: str) -> dict[str, Any] | str:
    """Return a call's arguments as a JSON object, or as the text itself if they are not one."""
    try:
        value: Any = msgspec.json.decode(arguments.strip() or "{}")
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return cast("dict[str, Any]", value) if isinstance(value, dict) and is_data(value) else arguments


def _steps(index: int, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the stream events for one content block."""
    if block["type"] == "text":
        empty: dict[str, Any] = {"text": ""}
        delta = {"type": "text_delta", "text": block["text"]}
    else:
        empty = {"input": {}}
        delta = {"type": "input_json_delta", "partial_json": msgspec.json.encode(block["input"]).decode()}
    yield {"type": "content_block_start", "index": index, "content_block": block | empty}
    yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}
