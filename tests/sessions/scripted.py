"""Turns as a generator would sample them, made by hand: each message has ids of its own."""

import asyncio
import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from services.sessions.tools.tool_errors import ToolError
from shared.arrays import pack_ids, pack_logprobs
from shared.messages import VersionSpan
from shared.turns import ChatMessage, SampledTurn, TurnRequest

GENERATION_PROMPT = 7


def user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: ChatMessage, **more: Any) -> ChatMessage:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


def call(name: str, arguments: str, call_id: str | None = "call-0") -> ChatMessage:
    function = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return function if call_id is None else {"id": call_id, **function}


def tool(text: str, call_id: str = "call-0") -> ChatMessage:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def rendered(messages: Sequence[ChatMessage]) -> list[int]:
    """Return two or three ids for each message, which depend on all of it, and the id that begins an assistant turn."""
    ids: list[int] = []
    for message in messages:
        hashed = zlib.crc32(msgspec.json.encode(message)) & 0xFFFFFF
        ids += [hashed, hashed + 1, *([hashed + 2] if hashed % 2 else [])]
    return [*ids, GENERATION_PROMPT]


def sampled(
    message: ChatMessage,
    *,
    appended_ids: Sequence[int] = (1, 2, 3),
    token_ids: Sequence[int] = (11, 12),
    finish_reason: str = "stop",
    spans: tuple[VersionSpan, ...] | None = None,
    at_s: float = 10.0,
) -> SampledTurn:
    return SampledTurn(
        appended_ids=pack_ids(appended_ids),
        token_ids=pack_ids(token_ids),
        logprobs=pack_logprobs([-0.5] * len(token_ids)),
        version_spans=spans or (VersionSpan(3, 0, len(token_ids), 1),),
        finish_reason=finish_reason,
        message=message,
        started_at_s=at_s,
        ended_at_s=at_s + 1.0,
    )


def answer(request: TurnRequest, message: ChatMessage, **more: Any) -> SampledTurn:
    """Return the turn that a generator answers: the messages after the recorded ones are rendered and appended."""
    return sampled(message, appended_ids=rendered(request.messages[request.num_recorded_messages :]), **more)


class ScriptedGenerators:
    """A TurnSource whose policy is a function of the request; it counts the turns that it sampled."""

    def __init__(self, policy: Callable[[TurnRequest], ChatMessage | SampledTurn]) -> None:
        self.policy = policy
        self.requests: list[TurnRequest] = []
        self.routing_keys: list[str] = []

    async def sample(self, request: TurnRequest, *, routing_key: str) -> SampledTurn:
        self.routing_keys.append(routing_key)
        self.requests.append(request)
        await asyncio.sleep(0)
        turn = self.policy(request)
        return turn if isinstance(turn, SampledTurn) else answer(request, turn)


def turns_of(*messages: ChatMessage) -> Callable[[TurnRequest], ChatMessage]:
    """Return a policy that says these messages, by the number of assistant messages before."""

    def policy(request: TurnRequest) -> ChatMessage:
        num_before = [message["role"] for message in request.messages].count("assistant")
        return messages[num_before]

    return policy


class InProcessTools:
    """Tools that are functions of the test; it counts their calls."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self.schemas = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in functions]
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._functions = functions

    @property
    def is_over(self) -> bool:
        return False

    def keeps_state(self, name: str) -> bool:
        return False

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        self.calls.append((name, arguments))
        if name not in self._functions:
            raise ToolError(f"Tool {name} not found.")
        result = self._functions[name](**arguments)
        return await result if inspect.isawaitable(result) else result
