"""The door of every HTTP service: pure ASGI, in front of the application, the same for all three.

    request --> size limit --> bearer key --> application
                   413           401

Deny by default: every path needs the key that its prefix names, but the open ones (liveness and readiness, which carry
no data). Websockets, which no service speaks, are closed before they open. Keys are compared as sha256 in constant
time. The password of basic authentication is taken for the key too: some clients can send nothing but what a URL holds
(``http://:KEY@host``). Errors are RFC 9457 problem+json.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/livez", "/readyz"})
MAX_BODY_BYTES = 8 * 1024 * 1024
KEEP_ALIVE_S = 75
"""How long a server keeps an idle connection: longer than clients do (httpx 5 s, proxies 60 s), or the request of one
that is late meets a door that is being closed."""
_POLICY_VIOLATION = 1008
_MAX_DRAINED_BYTES = 64 * 1024 * 1024
_DRAIN_S = 5.0


def problem(status: int, title: str, detail: str, **more: Any) -> dict[str, Any]:
    """Return an RFC 9457 body; ``type`` is a stable relative reference made from the title."""
    slug = "-".join(title.lower().split())
    return {"type": f"/problems/{slug}", "title": title, "status": status, "detail": detail, **more}


class HttpGuard:
    """ASGI middleware that limits bodies and asks for keys.

    Args:
        app: The application behind the door.
        keys: Path prefix to bearer key; the longest matching prefix decides. An empty key means that prefix is
            open, which settings allow on loopback only.
        max_body_bytes: Larger requests get 413, chunked ones too.
        open_paths: Paths that need no key.
    """

    def __init__(
        self,
        app: App,
        *,
        keys: Mapping[str, str],
        max_body_bytes: int = MAX_BODY_BYTES,
        open_paths: frozenset[str] = OPEN_PATHS,
    ) -> None:
        self._app = app
        self._open_paths = open_paths
        self._digests = {prefix: _digest(key) if key else None for prefix, key in keys.items()}
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
        path = str(scope["path"])
        if path not in self._open_paths and not self._has_key(path, headers.get(b"authorization", b"")):
            detail = "Send the header 'Authorization: Bearer KEY'. `headrace up` prints where the key is."
            await reply(send, problem(401, "Key required", detail), extra=[(b"www-authenticate", b"Bearer")])
            return
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._max_body_bytes:
            await drain(receive)
            await reply(send, self._too_large())
            return
        await self._limited(scope, receive, send)

    def _has_key(self, path: str, authorization: bytes) -> bool:
        prefixes = [prefix for prefix in self._digests if path.startswith(prefix)]
        if not prefixes:
            return False
        digest = self._digests[max(prefixes, key=len)]
        if digest is None:
            return True
        key = _key_in(authorization)
        return key is not None and hmac.compare_digest(hashlib.sha256(key).digest(), digest)

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


def _key_in(authorization: bytes) -> bytes | None:
    scheme, _, token = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return token.strip()
    if scheme.lower() != b"basic":
        return None
    try:
        return base64.b64decode(token.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


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
