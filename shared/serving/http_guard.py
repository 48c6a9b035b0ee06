"""Limits the number of requests to a service, and the size and duration of their bodies.

    request --> [worked on: <= max_requests] --> body: max_body_bytes, body_timeout_s --> application
                            503                           413            408

Pure ASGI, behind the key check (access/door.py); all services use it. Probes are neither counted nor refused, and
neither are routes that the service exempts. The time of a body counts only while the guard waits for the client, not
while the request waits in a queue here. A client that disconnects before its body is complete causes one log line and
no stack trace. Errors are RFC 9457 problem+json. No service speaks websockets: the server answers a request to upgrade
as plain HTTP, and everything else that is not HTTP is closed before it opens.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import Any, Final

from shared.service.current_request import current_request_id
from shared.serving.http_limits import HttpLimits

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PROBES: Final = frozenset({"/livez", "/readyz", "/health"})
_DEFAULTS: Final = HttpLimits()
_GONE: Final[Message] = {"type": "http.disconnect"}
_POLICY_VIOLATION = 1008
_MAX_DIGITS = 18


def problem(status: int, title: str, detail: str, **more: Any) -> dict[str, Any]:
    """Return an RFC 9457 body. Its ``type`` is a stable relative reference made from the title.

    The body also has the ``request_id`` of the current request, if there is one, as the request's log lines do.
    """
    slug = "-".join(title.lower().split())
    if request_id := current_request_id():
        more["request_id"] = request_id
    return {"type": f"/problems/{slug}", "title": title, "status": status, "detail": detail, **more}


async def reply(send: Send, body: dict[str, Any], *, extra: list[tuple[bytes, bytes]] | None = None) -> None:
    """Send ``body``, a problem of RFC 9457, as the whole answer to a request. Its ``status`` is the HTTP status."""
    data = json.dumps(body).encode()
    headers = [
        (b"content-type", b"application/problem+json"), (b"content-length", str(len(data)).encode()), *(extra or []),
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": body["status"], "headers": headers})
    await send({"type": "http.response.body", "body": data})


class HttpGuard:
    """ASGI middleware that limits the requests in progress, and the size and duration of their bodies.

    Args:
        app: The application behind it.
        limits: The most requests at a time, and the largest size and duration of a body.
        max_body_bytes: Returns the largest size of a request's body; None for the size in ``limits``.
        is_counted: Returns whether a request that is not a probe counts, and is refused if there are too many.
    """

    def __init__(
        self,
        app: App,
        limits: HttpLimits = _DEFAULTS,
        *,
        max_body_bytes: Callable[[Scope], int | None] = lambda _: None,
        is_counted: Callable[[Scope], bool] = lambda _: True,
    ) -> None:
        self._app = app
        self._limits = limits
        self._max_body_bytes = max_body_bytes
        self._is_counted = is_counted
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the application, or answer it with 503, 413 or 408."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await receive()
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        elif scope["path"] in PROBES or not self._is_counted(scope):
            await _Exchange(scope, receive, send, self._limits_of(scope)).run(self._app)
        elif self._num_requests >= self._limits.max_requests:
            detail = f"{self._num_requests} requests are in progress, which is the limit. Try again in a moment."
            await reply(send, problem(503, "Too many requests", detail), extra=[(b"retry-after", b"1")])
        else:
            self._num_requests += 1
            try:
                await _Exchange(scope, receive, send, self._limits_of(scope)).run(self._app)
            finally:
                self._num_requests -= 1

    def _limits_of(self, scope: Scope) -> HttpLimits:
        own = self._max_body_bytes(scope)
        return self._limits if own is None else replace(self._limits, max_body_bytes=own)


class _Exchange:
    """One request and its answer, with the limits on its body."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: HttpLimits) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._limits = limits
        self._num_declared = declared_length(scope)
        self._is_whole = self._num_declared == 0
        self._num_received = 0
        self._left_s = limits.body_timeout_s
        self._refusal: dict[str, Any] | None = None
        self._is_gone = False
        self._has_started = False

    async def run(self, app: App) -> None:
        """Let the application answer, or answer for it if the body was refused."""
        try:
            await app(self._scope, self.receive, self.send)
        except Exception as error:
            # An application may fail because the body is missing. Its client has the refusal, or has gone.
            if self._refusal is None and not self._is_gone:
                raise
            log.debug("%s %s ended with %s", self._scope["method"], self._path(), type(error).__name__)
        if self._is_gone:
            log.info("%s %s: the client went away before its body was whole", self._scope["method"], self._path())
        refusal, self._refusal = self._refusal, None
        if refusal is not None and not self._has_started:
            await reply(self._send, refusal)

    async def receive(self) -> Message:
        """Return the next part of the body, or a disconnect if the body is refused or the client has gone."""
        if self._is_whole:
            return await self._receive()
        if self._num_declared > self._limits.max_body_bytes:
            self._refusal = self._too_large()
        if self._refusal is not None or self._is_gone:
            return _GONE
        began_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._left_s):
                message = await self._receive()
        except TimeoutError:
            self._refusal = problem(
                408, "Body too slow", f"The body did not arrive within {self._limits.body_timeout_s:g} s."
            )
            return _GONE
        finally:
            self._left_s -= asyncio.get_running_loop().time() - began_at
        self._is_gone = message["type"] == "http.disconnect"
        self._num_received += len(message.get("body", b""))
        if self._num_received > self._limits.max_body_bytes:
            self._refusal = self._too_large()
            return _GONE
        self._is_whole = not self._is_gone and not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Pass an answer on, unless the body was refused."""
        if self._refusal is not None and not self._has_started:
            return
        self._has_started = True
        await self._send(message)

    def _path(self) -> str:
        return ascii(str(self._scope["path"])[:200])

    def _too_large(self) -> dict[str, Any]:
        return problem(413, "Body too large", f"A request may have at most {self._limits.max_body_bytes} bytes.")


def declared_length(scope: Scope) -> int:
    """Return the bytes that a request declares for its body: 0 without a body, -1 if the length is not known."""
    headers = {name.lower(): value for name, value in scope["headers"]}
    if b"transfer-encoding" in headers:
        return -1
    declared = headers.get(b"content-length", b"0")
    return int(declared) if declared.isdigit() and len(declared) <= _MAX_DIGITS else -1
