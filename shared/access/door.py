"""Refuses requests without a key that has the scope of their route. Pure ASGI; all services use it.

    request --> known key? --> known route? --> key has its scope? --> known query parameters? --> application
                401            404, 405         403                    422

Deny by default: a request without a known key gets a 401 even for an unknown path, and a path that is not in the
service's table never reaches the application. Only a session's key is checked by the application itself, so a path
below a session that does not exist is a 404 for everybody. The password of basic authentication is accepted as the key
too, because some clients can send a key only in the URL (``http://:KEY@host``).

A revoked key is refused after the next check of the keys file, an expired key at once. Streams of events or tokens that
such a key opened before are cut off within two seconds.
"""

import asyncio
import base64
import binascii
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_plus

from shared.access.keyring import Keyring
from shared.access.named_keys import NamedKey
from shared.access.route_table import INTERNAL, SESSION, Found, Need, Route, RouteTable
from shared.service.current_request import current_request
from shared.serving.http_guard import App, Message, Receive, Scope, Send, problem, reply

_LOOK_EVERY_S = 1.0
_MAX_ERRORS, _MAX_NAME = 10, 100
_NEEDS: dict[str, Need] = {"/internal/": INTERNAL, "/v1/sessions/": SESSION}
"""The needs of unknown paths, by their beginnings. The door cannot recognise the key of a session."""
_ASK_FOR_KEY = (b"www-authenticate", b"Bearer")


class Door:
    """ASGI middleware that lets a request pass only if its route, its key and its query parameters are accepted.

    Args:
        app: The application behind the door.
        routes: The service's routes and their scopes.
        keyring: The keys that the service accepts.
    """

    def __init__(self, app: App, *, routes: RouteTable, keyring: Keyring) -> None:
        self._app = app
        self._routes = routes
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the application, or answer it with 401, 403, 404, 405 or 422."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found = self._routes.find(str(scope["method"]), str(scope["path"]))
        need = _need(found, str(scope["path"]))
        if need is None or need == SESSION or self._keyring.is_open_to_all(need):
            await self._let_in(found, scope, receive, send)
            return
        shown = _key_in(scope)
        key = None if shown is None else self._keyring.find(shown, need)
        request = current_request()
        if request is not None and key is not None:
            request.key_name = key.name
        if key is None or key.has_expired():
            await _refuse_unknown(send, key, was_sent=bool(shown))
        elif found.route is not None and need not in key.scopes:
            await _refuse_scope(send, key, need)
        elif self._keyring.is_for_good(key):
            await self._let_in(found, scope, receive, send)
        else:
            watch = _Watch(lambda: self._keyring.allows(key, need), receive, send)
            await self._let_in(found, scope, watch.receive, watch.send)
            await watch.finish()

    async def _let_in(self, found: Found, scope: Scope, receive: Receive, send: Send) -> None:
        if found.route is not None:
            if wrong := _wrong_parameters(found.route, scope):
                await reply(send, _refusal_of(wrong))
            else:
                await self._app(scope, receive, send)
        elif found.methods:
            allowed = ", ".join(found.methods)
            body = problem(405, "Method not allowed", f"This path takes {allowed}. GET /openapi.json lists all routes.")
            await reply(send, body, extra=[(b"allow", allowed.encode())])
        else:
            body = problem(404, "Not found", "There is nothing at this path. GET /openapi.json lists all routes.")
            await reply(send, body)


def _wrong_parameters(route: Route, scope: Scope) -> dict[str, str]:
    """Return an error message for each wrong query parameter, by its name, in the request's order.

    A parameter is wrong if the route does not have it, or if it is repeated although the route takes one value.
    """
    query: bytes = scope.get("query_string", b"")
    if route.query is None or not query:
        return {}
    names = (unquote_plus(part.partition(b"=")[0].decode(errors="replace")) for part in query.split(b"&") if part)
    takes = f"this route takes {', '.join(sorted(route.query))}" if route.query else "this route takes none"
    wrong: dict[str, str] = {}
    for name, count in Counter(names).items():
        if name not in route.query:
            wrong[name] = f"there is no such query parameter; {takes}"
        elif count > 1 and name not in route.lists:
            wrong[name] = f"there are {count} values, and this query parameter takes one"
    return wrong


def _refusal_of(wrong: dict[str, str]) -> dict[str, Any]:
    errors = [{"field": _shown(name), "message": wrong[name]} for name in list(wrong)[:_MAX_ERRORS]]
    by_message: dict[str, list[str]] = {}
    for error in errors:
        by_message.setdefault(error["message"], []).append(error["field"])
    detail = "; ".join(f"{', '.join(fields)}: {message}" for message, fields in by_message.items())
    return problem(422, "Invalid request", detail, errors=errors)


def _shown(name: str) -> str:
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in name[:_MAX_NAME])


def _need(found: Found, path: str) -> Need | None:
    """Return the scope that a request needs, None if no key is needed. An unknown path gets a scope by its prefix."""
    if found.route is not None:
        return found.route.needs
    needs: list[Need] = [need for prefix, need in _NEEDS.items() if path.startswith(prefix)]
    return needs[0] if needs else "read"


class _Watch:
    """Reports a client as disconnected to the application, once the client's key is no longer valid.

    An application that streams an answer waits for this message, and ends the stream as if the client had left. An
    answer with a Content-Length is sent to its end.
    """

    def __init__(self, is_good: Callable[[], bool], receive: Receive, send: Send) -> None:
        self._is_good = is_good
        self._receive = receive
        self._send = send
        self._is_body_whole = False
        self._has_started = False
        self._has_length = False
        self._is_over = False
        self._is_cut = False

    async def receive(self) -> Message:
        if not self._is_body_whole:
            message = await self._receive()
            self._is_body_whole = not message.get("more_body", False)
            return message
        waiting = asyncio.ensure_future(self._receive())
        try:
            while not (await asyncio.wait({waiting}, timeout=_LOOK_EVERY_S))[0]:
                if not self._has_length and not self._is_good():  # an answer of known length is sent to its end
                    self._is_cut = True
                    return {"type": "http.disconnect"}
            return waiting.result()
        finally:
            waiting.cancel()

    async def send(self, message: Message) -> None:
        if self._is_cut and not self._has_started:
            return  # the application believes that the client has gone; `finish` answers it with 401
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
        self._has_started = True
        self._is_over = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def finish(self) -> None:
        """End an answer that was cut off; if the application gave up before it began to answer, send a 401."""
        if not self._is_cut or self._is_over:
            return
        if self._has_started:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await _refuse_unknown(self._send, None, was_sent=True)


async def _refuse_unknown(send: Send, key: NamedKey | None, *, was_sent: bool) -> None:
    if key is None and was_sent:
        detail = "This service does not know the key that was sent. `headrace up` prints where its key is."
    elif key is None:
        detail = "Send the header 'Authorization: Bearer KEY'. `headrace up` prints where the key is."
    else:
        detail = f"The key {key.name} has expired. Ask the operator of this service for another key."
    await reply(send, problem(401, "Key required", detail), extra=[_ASK_FOR_KEY])


async def _refuse_scope(send: Send, key: NamedKey, need: Need) -> None:
    has = ", ".join(sorted(key.scopes))
    body = problem(
        403,
        "Scope missing",
        f"This needs a key with the scope {need}; the key {key.name} has {has}. Use a key that has it.",
        missing_scope=need,
    )
    await reply(send, body)


def _key_in(scope: Scope) -> bytes | None:
    authorization = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
    scheme, _, token = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return bytes(token.strip())
    if scheme.lower() != b"basic":
        return None
    try:
        return base64.b64decode(token.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return None
