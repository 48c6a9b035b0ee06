"""Sends concurrent calls of headrace's Redis functions (functions.lua) together, in one round trip.

    call A --> sent
    call B --+                      answer to A
    call C --+--> wait meanwhile -------------> B, C, D sent together
    call D --+

Each call is still atomic by itself, and no call waits for others that may come. A thousand results at the same moment
cost a few round trips on one connection instead of a thousand connections. One task sends all calls. The timeout of a
call runs from its own start, also while other calls are sent first. The timeout begins anew whenever Redis reports that
it has no room.
"""

import asyncio
import contextvars
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis.exceptions import ResponseError

from shared.errors import UnavailableError
from shared.redis.redis_connection import LAST_BACKOFF_S, NO_ROOM, TRANSIENT, Redis, patiently, translate

_MAX_CALLS, _MAX_BYTES = 128, 8 << 20
"""Most calls and bytes in one round trip, which then takes less than a second. A longer call is sent by itself."""


@dataclass(eq=False)
class _Call:
    function: str
    keys: Sequence[str]
    args: Sequence[str | bytes | int | float]
    timeout_s: float
    answer: "asyncio.Future[Any]"
    """Redis's answer, or an exception, as a result: a future with an exception that nothing reads causes a warning."""
    _deadline: asyncio.TimerHandle | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the arguments. Numbers are not counted, because they are short."""
        return sum(len(arg) for arg in self.args if isinstance(arg, str | bytes))

    def end(self, answer: Any) -> None:
        if not self.answer.done():  # done already if its time is over or its caller was cancelled
            self.answer.set_result(answer)

    def begin_time(self, *, after_s: float = 0.0) -> None:
        """Restart the timeout of this call, to begin in ``after_s`` seconds."""
        self.end_time()
        self._deadline = self.answer.get_loop().call_later(after_s + self.timeout_s, self._give_up)

    def end_time(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _give_up(self) -> None:
        self.end(UnavailableError(f"Redis function {self.function} was not answered within {self.timeout_s:g} s"))


class PipelinedCalls:
    """Sends the function calls of one Redis client, together where several are waiting."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._waiting: dict[_Call, None] = {}  # includes the calls that are being sent
        self._sender: asyncio.Task[None] | None = None
        # Logs name the run that this object was made for, not the group of the first caller.
        self._context = contextvars.copy_context()

    async def call(
        self,
        function: str,
        *,
        keys: Sequence[str],
        args: Sequence[str | bytes | int | float] = (),
        timeout_s: float = 60.0,
    ) -> Any:
        """Call a Redis function together with other waiting calls, and return its answer.

        Raises:
            FencedError: A newer trainer owns the run.
            StateLostError: The run's streams or headrace's functions are gone.
            UnavailableError: Redis did not answer within ``timeout_s``, or refused the call.
        """
        mine = _Call(function, keys, args, timeout_s, asyncio.get_running_loop().create_future())
        mine.begin_time()
        self._waiting[mine] = None
        self._begin_to_send()
        try:
            answer = await mine.answer
        finally:
            mine.end_time()
            self._waiting.pop(mine, None)
            self._end_unless_needed()
        if isinstance(answer, ResponseError):
            raise translate(answer) from answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _begin_to_send(self) -> None:
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all(), name="send pipelined calls", context=self._context)

    def _end_unless_needed(self) -> None:
        """Stop the sending task if no caller waits any more."""
        if self._sender is not None and not self._waiting:
            self._sender.cancel()
            self._sender = None

    async def _send_all(self) -> None:
        me = asyncio.current_task()
        try:
            while self._waiting and self._sender is me:
                await self._send(self._next_calls())
        finally:
            if self._sender is me:
                self._sender = None
                for call in self._waiting:  # not empty only if other code cancelled this task
                    call.end(UnavailableError(f"Redis function {call.function} was cancelled"))

    def _next_calls(self) -> list[_Call]:
        """Return the calls that have waited longest, as many as fit into one round trip."""
        calls: list[_Call] = []
        num_bytes = 0
        for call in itertools.islice(self._waiting, _MAX_CALLS):
            num_bytes += call.num_bytes
            if calls and num_bytes > _MAX_BYTES:
                break
            calls.append(call)
        return calls

    def _begin_time_anew(self) -> None:
        for call in self._waiting:
            call.begin_time(after_s=LAST_BACKOFF_S)

    async def _send(self, calls: list[_Call]) -> None:
        """Send these calls in one round trip. If it fails, the first call fails, and the others are sent again."""
        first = calls[0]

        async def send() -> list[Any]:
            pipeline: Any = self._client.pipeline(transaction=False)
            for call in calls:
                pipeline.fcall(call.function, len(call.keys), *call.keys, *cast("Sequence[str]", call.args))
            async with asyncio.timeout(first.timeout_s):
                answers: list[Any] = await pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, NO_ROOM):
                    self._begin_time_anew()
                if isinstance(answer, TRANSIENT):
                    raise answer
            return answers

        try:
            answers = await patiently(send, what=f"Redis function {first.function}", timeout_s=first.timeout_s)
            answered = list(zip(calls, answers, strict=True))
        except Exception as error:  # noqa: BLE001  the caller raises it
            answered = [(first, error)]
        for call, answer in answered:
            self._waiting.pop(call, None)
            call.end(answer)
