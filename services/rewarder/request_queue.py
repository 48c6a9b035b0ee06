"""Bounds what comes over HTTP: so many requests are worked on at a time, a few more wait, the others come back later.

    request --> [in flight: <= max_inflight] --> application
                [waiting:   <= max_queued]
                429, Retry-After

Pure ASGI, in front of the routes that cost something. A request waits before its body is read: what waits takes no
memory to speak of.
"""

import math
import time
from http import HTTPStatus

from services.rewarder.rewarder_metrics import HTTP_LANE, RewarderMetrics
from services.rewarder.turnstile import TurnedAwayError, Turnstile
from shared.http_guard import App, Receive, Scope, Send, drain, problem, reply

BOUNDED_PATHS = frozenset({"/v1/score", "/v1/rewards/check"})
_LONGEST_RETRY_AFTER_S = 60
_SMOOTHING = 0.1


class RequestQueue:
    """ASGI middleware.

    Args:
        app: The application.
        max_inflight: Requests at a time.
        max_queued: Requests that may wait.
        queue_timeout_s: Longest wait; then 429 too.
        metrics: Counts who waits.
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
        """Let the request in, now or later, or answer it here."""
        if scope["type"] != "http" or scope["path"] not in BOUNDED_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            with self._queued.track_inprogress():
                await self._turnstile.enter(lane=HTTP_LANE, tokens=0)
        except TurnedAwayError:
            await self._refuse(receive, send)
            return
        await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_at = time.monotonic()
        try:
            await self._app(scope, receive, send)
        finally:
            self._mean_s += _SMOOTHING * (time.monotonic() - began_at - self._mean_s)
            self._turnstile.leave()

    async def _refuse(self, receive: Receive, send: Send) -> None:
        retry_after_s = self._retry_after_s()
        detail = (
            f"{self._max_inflight} requests are worked on and {self._max_queued} wait, which is all that this rewarder "
            f"takes: come back in {retry_after_s} s, or send fewer and larger batches."
        )
        body = problem(HTTPStatus.TOO_MANY_REQUESTS, "Too many requests", detail)
        await drain(receive)
        await reply(send, body, extra=[(b"retry-after", str(retry_after_s).encode())])

    def _retry_after_s(self) -> int:
        """Return about how long those that are here will take."""
        num_present = self._turnstile.num_in_flight + self._turnstile.num_queued
        seconds = self._mean_s * num_present / self._max_inflight
        return max(1, min(_LONGEST_RETRY_AFTER_S, math.ceil(seconds)))
