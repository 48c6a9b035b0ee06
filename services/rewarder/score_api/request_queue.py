"""Limits expensive HTTP requests: some are handled at a time, some wait, and the rest get a 429 with Retry-After.

    request --> [in flight: <= max_inflight] --> application answers
            --> [waiting: <= max_queued] --> gets its turn, or is dropped when its client hangs up
            --> refused with 429, Retry-After

Pure ASGI, in front of the routes that score, check or test rewards. At most about 64 KiB of a waiting request's body
is read, to notice when its client hangs up. Waiting requests therefore need little memory.
"""

import asyncio
import math
import re
import time
from collections import deque
from http import HTTPStatus

from services.rewarder.rewarder_metrics import HTTP_LANE, RewarderMetrics
from services.rewarder.turnstile import TurnedAwayError, Turnstile, WaitedTooLongError
from shared.serving.http_guard import App, Message, Receive, Scope, Send, problem, reply

BOUNDED_PATHS = re.compile(r"/v1/score|/v1/rewards/check|/v1/rewards/[^/]+/test")
_LONGEST_RETRY_AFTER_S = 60
_SMOOTHING = 0.1
_MAX_READ_AHEAD_BYTES = 64 * 1024


class RequestQueue:
    """ASGI middleware that lets expensive requests wait for their turn, and answers with a 429 when too many wait.

    Args:
        app: The ASGI application behind the queue.
        max_inflight: Most requests handled at a time.
        max_queued: Most requests that wait.
        queue_timeout_s: Longest wait in seconds. A request that waits longer gets a 429 too.
        metrics: Receives the number of waiting requests.
    """

    def __init__(
        self, app: App, *, max_inflight: int, max_queued: int, queue_timeout_s: float, metrics: RewarderMetrics
    ) -> None:
        self._app = app
        self._max_inflight = max_inflight
        self._max_queued = max_queued
        self._queued = metrics.queued.labels("requests", HTTP_LANE)
        self._turnstile = Turnstile(
            max_concurrency=max_inflight, max_queued=max_queued, queue_timeout_s=queue_timeout_s
        )
        self._mean_s = 1.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, now or after a wait, or answer with a 429. Drop it if its client hangs up meanwhile."""
        if scope["type"] != "http" or not BOUNDED_PATHS.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        received: deque[Message] = deque()

        async def receive_again() -> Message:
            return received.popleft() if received else await receive()

        try:
            with self._queued.track_inprogress():
                is_here = await self._turn(receive, received)
        except TurnedAwayError as error:
            await self._refuse(send, error)
            return
        if is_here:
            await self._serve(scope, receive_again, send)

    async def _turn(self, receive: Receive, received: deque[Message]) -> bool:
        """Wait for the turn of a request. Return False, without a turn, if its client hangs up meanwhile.

        Raises:
            TurnedAwayError: Too many requests wait, or this one has waited too long.
        """
        entering = asyncio.create_task(self._turnstile.enter(lane=HTTP_LANE, tokens=0), name="turn of a request")
        leaving = asyncio.create_task(_client_leaves(receive, received), name="client of a request")
        is_here = False
        try:
            await asyncio.wait({entering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            is_here = not leaving.done()
        finally:
            entering.cancel()
            leaving.cancel()
            await asyncio.gather(entering, leaving, return_exceptions=True)
            if not is_here and not entering.cancelled() and entering.exception() is None:
                self._turnstile.leave()
        if is_here:
            entering.result()
        return is_here

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_at = time.monotonic()
        try:
            await self._app(scope, receive, send)
        finally:
            self._mean_s += _SMOOTHING * (time.monotonic() - began_at - self._mean_s)
            self._turnstile.leave()

    async def _refuse(self, send: Send, error: TurnedAwayError) -> None:
        retry_after_s = self._retry_after_s()
        if isinstance(error, WaitedTooLongError):
            what = f"This request {error}, while others were before it"
        else:
            what = (
                f"{self._max_inflight} requests are being handled and {self._max_queued} wait, which is the limit of "
                "this rewarder"
            )
        detail = f"{what}: come back in {retry_after_s} s, or send fewer and larger batches."
        body = problem(HTTPStatus.TOO_MANY_REQUESTS, "Too many requests", detail)
        await reply(send, body, extra=[(b"retry-after", str(retry_after_s).encode())])

    def _retry_after_s(self) -> int:
        """Return the seconds for Retry-After, from 1 to 60: about the time that all present requests will take."""
        num_present = self._turnstile.num_in_flight + self._turnstile.num_queued
        seconds = self._mean_s * num_present / self._max_inflight
        return max(1, min(_LONGEST_RETRY_AFTER_S, math.ceil(seconds)))


async def _client_leaves(receive: Receive, received: deque[Message]) -> None:
    """Return when the client has hung up, and keep its messages in ``received``.

    After about 64 KiB, stop reading and do not return: the caller then cancels this coroutine.
    """
    num_bytes = 0
    while num_bytes < _MAX_READ_AHEAD_BYTES:
        message = await receive()
        received.append(message)
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message.get("body", b""))
    await asyncio.Event().wait()
