"""Calls of functions.lua that are made at the same time share a round trip.

    call A --> sent
    call B --+                      answer to A
    call C --+--> wait meanwhile -------------> B, C, D sent together
    call D --+

Each is still all or nothing by itself, and none waits for others that may come. A thousand results at the same moment
cost a few round trips on one connection, not a thousand connections. Time runs for each from its own start, and goes on
while others are sent before it; it begins anew whenever Redis says that it has no room.
"""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from redis.exceptions import ResponseError

from shared.errors import UnavailableError
from shared.redis_connection import LAST_BACKOFF_S, NO_ROOM, TRANSIENT, Redis, patiently, translate

_MAX_CALLS, _MAX_BYTES = 128, 8 << 20
"""In one round trip, which takes less than a second then; a longer call goes alone."""


@dataclass(eq=False)
class _Call:
    function: str
    keys: Sequence[str]
    args: Sequence[str | bytes | int | float]
    timeout_s: float
    limit: asyncio.Timeout
    answers: list[Any] = field(default_factory=list[Any])

    @property
    def num_bytes(self) -> int:
        """Of its arguments; numbers are short."""
        return sum(len(arg) for arg in self.args if isinstance(arg, str | bytes))


class PipelinedCalls:
    """Of one client."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._waiting: dict[_Call, None] = {}
        self._sending = asyncio.Lock()

    async def call(
        self,
        function: str,
        *,
        keys: Sequence[str],
        args: Sequence[str | bytes | int | float] = (),
        timeout_s: float = 60.0,
    ) -> Any:
        """Do what redis_connection.call does, and raise what it raises."""
        mine = _Call(function, keys, args, timeout_s, asyncio.timeout(timeout_s))
        try:
            async with mine.limit:
                self._waiting[mine] = None
                while not mine.answers:
                    async with self._sending:
                        if not mine.answers:  # nobody who was ahead has taken it along
                            await self._send(self._next_calls(), timeout_s)
        except TimeoutError as error:
            if not mine.answers:
                raise UnavailableError(f"Redis function {function} was not answered within {timeout_s:g} s") from error
        finally:
            self._waiting.pop(mine, None)
        (answer,) = mine.answers
        if isinstance(answer, ResponseError):
            raise translate(answer) from answer
        return answer

    def _next_calls(self) -> list[_Call]:
        """Return those that have waited longest, as many as one round trip takes."""
        calls: list[_Call] = []
        num_bytes = 0
        for call in itertools.islice(self._waiting, _MAX_CALLS):
            num_bytes += call.num_bytes
            if calls and num_bytes > _MAX_BYTES:
                break
            calls.append(call)
        return calls

    def _begin_time_anew(self) -> None:
        asked_again_at = asyncio.get_running_loop().time() + LAST_BACKOFF_S
        for call in self._waiting:
            if not call.limit.expired():
                call.limit.reschedule(asked_again_at + call.timeout_s)

    async def _send(self, calls: list[_Call], timeout_s: float) -> None:
        """Send these, in one round trip. Who sends them may be cancelled: the others send theirs again."""

        async def send() -> list[Any]:
            pipeline: Any = self._client.pipeline(transaction=False)
            for call in calls:
                pipeline.fcall(call.function, len(call.keys), *call.keys, *cast("Sequence[str]", call.args))
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, NO_ROOM):
                    self._begin_time_anew()
                if isinstance(answer, TRANSIENT):
                    raise answer
            return answers

        answers = await patiently(send, what=f"Redis function {calls[0].function}", timeout_s=timeout_s)
        for call, answer in zip(calls, answers, strict=True):
            call.answers.append(answer)
            self._waiting.pop(call, None)
