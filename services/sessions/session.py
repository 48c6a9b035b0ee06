"""The session of one rollout: has generators sample its turns, and records each turn before it returns it.

turn(messages) --+-- recorded already ----------------------------> the recorded turn
                 +-- under way -----------------------------------> the same answer
                 +-- new --> continuation --> generator --> recorded --> answered

A turn is one assistant message of the policy. The continuation is the recorded part of the conversation, as token ids.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec

from services.sessions.recording.recordable import check_recordable
from services.sessions.recording.recorded import Entry, RolloutEnd, ToolResults, digest
from services.sessions.recording.recording import Recording
from shared.arrays import ID_DTYPE
from shared.errors import MessageError
from shared.turns import ChatMessage, SampledTurn, TurnRefusedError, TurnRequest

_BYTES_PER_TOKEN = 4


class TurnSource(Protocol):
    """Samples turns for a session. turn_client.py implements it with requests to the generators."""

    async def sample(self, request: TurnRequest, *, routing_key: str) -> SampledTurn:
        """Have a turn sampled, once a generator can. Turns with the same routing key go to the same generator.

        Raises TurnRefusedError if no generator will ever be able to sample it.
        """
        ...


class Session:
    """The conversation of one rollout: has new turns sampled and records them, and returns recorded turns again.

    Args:
        session_id: The rollout's id; another id for a session for evaluation.
        run_id: The run whose policy is sampled.
        generators: Source of the sampled turns.
        record: Stores an entry (a turn, tool results, or the rollout's end) under its number, from 0.
        entries: The entries that were stored before, in order.
        routing_key: Turns of sessions with the same key go to the same generator; None for the session's id.
        sampling: Returns a context that is entered while a new turn is sampled. It may refuse the turn by an exception.
    """

    def __init__(
        self,
        session_id: str,
        *,
        run_id: str,
        generators: TurnSource,
        record: Callable[[int, Entry], Awaitable[None]],
        entries: Iterable[Entry] = (),
        routing_key: str | None = None,
        sampling: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.session_id = session_id
        self.recording = Recording(entries)
        self._run_id = run_id
        self._generators = generators
        self._record = record
        self._routing_key = session_id if routing_key is None else routing_key
        self._sampling = sampling
        self._writing = asyncio.Lock()
        self._in_flight: dict[bytes, asyncio.Task[SampledTurn]] = {}

    async def turn(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]],
        *,
        max_tokens: int = 0,
        max_row_tokens: int = 0,
        max_completion_tokens: int = 0,
        seed: int | None = None,
    ) -> SampledTurn:
        """Return the policy's next message in a conversation: sampled, or recorded if the request was made before.

        If the caller is cancelled, the turn is still sampled and recorded.

        Args:
            messages: The whole conversation.
            tools: JSON schemas of the tools that the model may call.
            max_tokens: Most tokens to sample; 0 for as many as the run and the context allow.
            max_row_tokens: Most tokens of the whole conversation, prompt included; 0 for as many as the context allows.
            max_completion_tokens: Most tokens of the conversation after its prompt, instead of ``max_row_tokens``; 0
                for no limit.
            seed: Only distinguishes requests. Another seed asks for another turn.

        Raises:
            TurnRefusedError: The messages are malformed, or no generator can continue them.
            SessionFullError: The turn cannot be recorded.
            GroupTakenError: Another replica plays the session.
            Exception: The session's ``sampling`` refused the turn.
        """
        _require_recordable(messages)
        request = _digest(messages, tools, max_tokens, max_row_tokens, max_completion_tokens, seed)
        if (recorded := self.recording.repeated(request)) is not None:
            return recorded
        sampling = self._in_flight.get(request)
        if sampling is None:
            under_way = contextlib.ExitStack()
            under_way.enter_context(self._sampling())
            sampling = asyncio.create_task(
                self._sample(
                    request,
                    messages,
                    tools,
                    max_tokens=max_tokens,
                    max_row_tokens=max_row_tokens,
                    max_completion_tokens=max_completion_tokens,
                ),
                name=f"turn of {self.session_id}",
            )
            self._in_flight[request] = sampling
            sampling.add_done_callback(lambda _: self._in_flight.pop(request))
            sampling.add_done_callback(lambda _: under_way.close())
        return await asyncio.shield(sampling)

    def is_recorded(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]],
        *,
        max_tokens: int = 0,
        max_row_tokens: int = 0,
    ) -> bool:
        """Whether ``turn`` with these arguments returns a recorded turn."""
        return self.recording.repeated(_digest(messages, tools, max_tokens, max_row_tokens, 0, None)) is not None

    def estimated_tokens(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> int:
        """Estimate how many tokens the next turn would be conditioned on, without asking a generator.

        Recorded tokens are counted. In messages without recorded tokens, four bytes of JSON count as one token.

        Raises:
            TurnRefusedError: The messages are malformed.
        """
        _require_recordable(messages)
        continuation = self.recording.continuation(messages, tools)
        follow = messages[continuation.num_recorded_messages :]
        shown: Sequence[dict[str, Any]] = () if continuation.num_recorded_messages else tools
        num_bytes = sum(len(msgspec.json.encode(part)) for part in (*shown, *follow))
        return len(continuation.recorded_ids) // ID_DTYPE.itemsize + math.ceil(num_bytes / _BYTES_PER_TOKEN)

    async def record(self, entry: ToolResults | RolloutEnd) -> None:
        """Record the results of a turn's tool calls, or the rollout's end.

        Raises:
            SessionFullError: The entry has no room in the group's message.
            GroupTakenError: Another replica plays the session.
        """
        async with self._writing:
            await self._add(entry)

    async def close(self) -> None:
        """Cancel the turns that are being sampled. A turn that is being recorded is recorded first."""
        async with self._writing:  # an entry that is being written is written
            sampling = [*self._in_flight.values()]
            for task in sampling:
                task.cancel()
        await asyncio.gather(*sampling, return_exceptions=True)

    async def _sample(
        self,
        request: bytes,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]],
        *,
        max_tokens: int,
        max_row_tokens: int,
        max_completion_tokens: int,
    ) -> SampledTurn:
        continuation = self.recording.continuation(messages, tools)
        if max_completion_tokens and continuation.turn is not None:
            max_row_tokens = self.recording.num_prompt_tokens(continuation.turn) + max_completion_tokens
        turn = await self._generators.sample(
            TurnRequest(
                run_id=self._run_id,
                request_id=self.session_id,
                messages=list(messages),
                tools=list(tools),
                recorded_ids=continuation.recorded_ids,
                num_recorded_messages=continuation.num_recorded_messages,
                max_tokens=max_tokens,
                max_row_tokens=max_row_tokens,
            ),
            routing_key=self._routing_key,
        )
        async with self._writing:
            await self._add(
                self.recording.turn_after(continuation, request=request, messages=messages, tools=tools, turn=turn)
            )
        return turn

    async def _add(self, entry: Entry) -> None:
        await self._record(self.recording.num_entries, entry)
        self.recording.add(entry)


def _require_recordable(messages: Sequence[ChatMessage]) -> None:
    try:
        check_recordable(messages)
    except MessageError as error:
        raise TurnRefusedError(str(error), kind="malformed") from error


def _digest(messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], *more: int | None) -> bytes:
    return digest([list(messages), list(tools), *more])
