"""Wraps a service's application in its access log, key check and limits, in the same order for all services.

request --> RequestLog --> HeadRequests --> Door -----> HttpGuard -----------------> application
            adds an id,    makes HEAD       checks      limits the number of requests,
            logs           a GET            the key     the size and the time of bodies
"""

import asyncio

from shared.access.door import Door
from shared.access.keyring import Keyring
from shared.access.request_log import RequestLog
from shared.access.route_table import Route, RouteTable
from shared.serving.http_guard import App, HttpGuard, Message, Receive, Scope, Send
from shared.serving.http_limits import HttpLimits


def guarded(app: App, *, routes: RouteTable, keyring: Keyring, limits: HttpLimits) -> App:
    """Return the application behind its access log, HEAD handling, key check and request limits."""

    def route_of(scope: Scope) -> Route | None:
        return routes.find(str(scope["method"]), str(scope["path"])).route

    def max_body_bytes(scope: Scope) -> int | None:
        route = route_of(scope)
        return None if route is None else route.max_body_bytes

    def is_counted(scope: Scope) -> bool:
        route = route_of(scope)
        return route is None or route.is_counted

    guard = HttpGuard(app, limits, max_body_bytes=max_body_bytes, is_counted=is_counted)
    door = Door(guard, routes=routes, keyring=keyring)
    return RequestLog(HeadRequests(door), routes=routes)


class HeadRequests:
    """Answers HEAD wherever there is GET, with the same status and headers and without a body.

    A body that is a stream is cut off at its first piece.

    Args:
        app: An ASGI application that does not handle HEAD.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. HEAD becomes GET, and only the status and headers of its answer are sent."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        is_cut_off = asyncio.Event()

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
            elif not is_cut_off.is_set():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                if message.get("more_body", False):
                    is_cut_off.set()

        answering = asyncio.create_task(
            _run(self._app, {**scope, "method": "GET"}, receive, send_head), name="answering HEAD"
        )
        cutting = asyncio.create_task(is_cut_off.wait(), name="cutting off HEAD")
        try:
            await asyncio.wait({answering, cutting}, return_when=asyncio.FIRST_COMPLETED)
            if not is_cut_off.is_set():
                await answering
        finally:
            answering.cancel()
            cutting.cancel()
            await asyncio.gather(answering, cutting, return_exceptions=True)


async def _run(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)
