"""Limits calls of one function, or requests to one endpoint: how many at a time, and how many per minute.

    lane A: [request, request] --+
    lane B: [request] -----------+--> waits for a slot and for room in the minute --> goes out --> frees its slot
    lane C: [request] -----------+    (lanes take turns)                              (a retry counts too)

At most the allowed number of requests start in any window of 60 seconds. A request with more tokens than the limit
starts when no other request has started for a minute. A retry keeps its slot, but waits for room in the minute too.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 60.0


class TurnedAwayError(Exception):
    """Too many requests wait, or this one has waited too long. The message says which."""


class WaitedTooLongError(TurnedAwayError):
    """The request waited, but its turn did not come in time."""


@dataclass(frozen=True, eq=False)
class _Waiter:
    tokens: int
    admitted: "asyncio.Future[None]"


class Turnstile:
    """Limits the calls of one function, the requests to one endpoint, or expensive HTTP requests. None means no limit.

    Args:
        max_concurrency: Most requests at a time.
        max_queued: Most waiting requests. A further one is turned away.
        requests_per_minute: Most requests that start in any 60 seconds.
        tokens_per_minute: Most tokens of the requests that start in any 60 seconds.
        queue_timeout_s: Longest wait, in seconds.
        now: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        *,
        max_concurrency: int | None = None,
        max_queued: int | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        queue_timeout_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_concurrency = max_concurrency
        self._max_queued = max_queued
        self._max_requests = requests_per_minute
        self._max_tokens = tokens_per_minute
        self._queue_timeout_s = queue_timeout_s
        self._now = now
        self._lanes: dict[str, deque[_Waiter]] = {}
        self._sent: deque[tuple[float, int]] = deque()
        self._tokens_sent = 0
        self._timer: asyncio.TimerHandle | None = None
        self.num_in_flight = 0
        self.num_queued = 0

    async def enter(self, *, lane: str, tokens: int) -> None:
        """Wait until a request may start. The caller must call ``leave`` when the request has ended.

        Requests of different lanes (one per run, and one for HTTP) take turns.

        Raises:
            WaitedTooLongError: The request has waited ``queue_timeout_s`` seconds.
            TurnedAwayError: ``max_queued`` requests wait already.
        """
        is_full = self._max_queued is not None and self.num_queued >= self._max_queued
        if is_full and (self._lanes or not self._has_room(tokens)):
            raise TurnedAwayError(f"{self.num_queued} requests wait already")
        waiter = _Waiter(tokens, asyncio.get_running_loop().create_future())
        self._lanes.setdefault(lane, deque()).append(waiter)
        self.num_queued += 1
        self._let_through()
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await waiter.admitted
        except BaseException as error:
            if waiter.admitted.done() and not waiter.admitted.cancelled():
                self.leave()
            else:
                self._withdraw(lane, waiter)
            if isinstance(error, TimeoutError):
                detail = f"waited {self._queue_timeout_s:g} s for its turn: {self._limits()}"
                raise WaitedTooLongError(detail) from error
            raise

    def leave(self) -> None:
        """Free the slot of a request that has ended, and let the next waiting request start."""
        self.num_in_flight -= 1
        self._let_through()

    async def retry(self, tokens: int, *, within_s: float) -> None:
        """Wait until a retry fits into the limits per minute, and count it. The caller keeps its slot meanwhile.

        Raises:
            WaitedTooLongError: The wait would be longer than ``within_s`` seconds.
        """
        give_up_at = self._now() + within_s
        while (wait_s := self._wait_s(tokens)) > 0:
            if self._now() + wait_s > give_up_at:
                raise WaitedTooLongError(f"no room for one more within the deadline: {self._limits()}")
            await asyncio.sleep(wait_s)
        self._count(tokens)

    def _let_through(self) -> None:
        while self._lanes:
            lane, queue = next(iter(self._lanes.items()))
            if not self._has_room(queue[0].tokens):
                self._come_back(queue[0].tokens)
                return
            waiter = queue.popleft()
            self.num_queued -= 1
            del self._lanes[lane]
            if queue:
                self._lanes[lane] = queue  # at the end, so that lanes take turns
            if waiter.admitted.done():  # cancelled, but its task has not run yet to withdraw it
                continue
            self.num_in_flight += 1
            self._count(waiter.tokens)
            waiter.admitted.set_result(None)

    def _withdraw(self, lane: str, waiter: _Waiter) -> None:
        queue = self._lanes.get(lane)
        if queue is None or waiter not in queue:
            return
        queue.remove(waiter)
        self.num_queued -= 1
        if not queue:
            del self._lanes[lane]
        self._let_through()

    def _has_room(self, tokens: int) -> bool:
        has_place = self._max_concurrency is None or self.num_in_flight < self._max_concurrency
        return has_place and self._wait_s(tokens) <= 0

    def _wait_s(self, tokens: int) -> float:
        """Return the seconds until a request of ``tokens`` tokens fits into the limits per minute; 0 if it fits now."""
        now = self._now()
        while self._sent and self._sent[0][0] <= now - WINDOW_S:
            self._tokens_sent -= self._sent.popleft()[1]
        requests, total = len(self._sent), self._tokens_sent
        for sent_at, sent_tokens in self._sent:
            if self._fits(requests, total, tokens):
                return 0.0
            requests, total = requests - 1, total - sent_tokens
            if self._fits(requests, total, tokens):
                return sent_at + WINDOW_S - now
        return 0.0

    def _fits(self, num_requests: int, num_tokens: int, tokens: int) -> bool:
        has_requests = self._max_requests is None or num_requests < self._max_requests
        has_tokens = self._max_tokens is None or num_tokens == 0 or num_tokens + tokens <= self._max_tokens
        return has_requests and has_tokens

    def _limits(self) -> str:
        limits = (
            (self._max_concurrency, "at a time"),
            (self._max_requests, "a minute"),
            (self._max_tokens, "tokens a minute"),
        )
        return ", ".join(f"{limit} {of_what}" for limit, of_what in limits if limit is not None)

    def _count(self, tokens: int) -> None:
        if self._max_requests is not None or self._max_tokens is not None:
            self._sent.append((self._now(), tokens))
            self._tokens_sent += tokens

    def _come_back(self, tokens: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wait_s = self._wait_s(tokens)
        if wait_s > 0:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._let_through)
