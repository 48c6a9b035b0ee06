"""Limits what an HTTP service reads: pure ASGI, behind the door (access/door.py), the same for all three.

    request --> size limit --> application
                   413

Websockets, which no service speaks, are closed before they open. Errors are RFC 9457 problem+json.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from shared.access.current_request import current_request_id

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 8 * 1024 * 1024
KEEP_ALIVE_S = 75
"""How long a server keeps an idle connection: longer than clients do (httpx 5 s, proxies 60 s), or the request of one
that is late meets a door that is being closed."""
_POLICY_VIOLATION = 1008
_MAX_DRAINED_BYTES = 64 * 1024 * 1024
_DRAIN_S = 5.0


def problem(status: int, title: str, detail: str, **more: Any) -> dict[str, Any]:
    """Return an RFC 9457 body; ``type`` is a stable relative reference made from the title.

    It has the ``request_id`` of the request that is being answered, by which its lines in the log are found.
    """
    slug = "-".join(title.lower().split())
    if request_id := current_request_id():
        more["request_id"] = request_id
    return {"type": f"/problems/{slug}", "title": title, "status": status, "detail": detail, **more}


class HttpGuard:
    """ASGI middleware that limits bodies.

    Args:
        app: The application behind it.
        max_body_bytes: Larger requests get 413, chunked ones too.
    """

    def __init__(self, app: App, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in, or answer it here."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await receive()
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._max_body_bytes:
            await drain(receive)
            await reply(send, self._too_large())
            return
        await self._limited(scope, receive, send)

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application on a body that ends at the limit, whatever length was declared."""
        received, is_whole, has_started = 0, False, False

        async def counted() -> Message:
            nonlocal received, is_whole
            message = await receive()
            is_whole = not message.get("more_body", False)
            received += len(message.get("body", b""))
            return message if received <= self._max_body_bytes else {"type": "http.disconnect"}

        async def answer(message: Message) -> None:
            nonlocal has_started
            if has_started or received <= self._max_body_bytes:
                has_started = True
                await send(message)

        try:
            await self._app(scope, counted, answer)
        finally:
            if received > self._max_body_bytes and not has_started:
                if not is_whole:
                    await drain(receive)
                await reply(send, self._too_large())

    def _too_large(self) -> dict[str, Any]:
        return problem(413, "Body too large", f"A request may have at most {self._max_body_bytes} bytes.")


async def drain(receive: Receive) -> None:
    """Throw away the rest of a body, within bounds: who still sends when the connection is closed never reads why."""
    num_left, is_whole = _MAX_DRAINED_BYTES, False
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while num_left > 0 and not is_whole:
                message = await receive()
                num_left -= len(message.get("body", b""))
                is_whole = not message.get("more_body", False)


async def reply(send: Send, body: dict[str, Any], *, extra: list[tuple[bytes, bytes]] | None = None) -> None:
    """Answer with a problem."""
    data = json.dumps(body).encode()
    headers = [
        (b"content-type", b"application/problem+json"), (b"content-length", str(len(data)).encode()), *(extra or []),
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": body["status"], "headers": headers})
    await send({"type": "http.response.body", "body": data})
