"""Runs uvicorn on a socket that the caller has opened, with deadlines and limits for clients.

    acceptor.py --> http_connection.py --> uvicorn --> application: access/, http_guard.py

The caller handles signals.
"""

import contextlib
import socket
from collections.abc import Generator
from typing import Any, cast

import uvicorn

from shared.service.tls import ServerCertificate
from shared.serving.acceptor import Acceptor
from shared.serving.http_connection import Http
from shared.serving.http_guard import App, Message, Receive, Scope, Send, declared_length
from shared.serving.http_limits import HttpLimits

_DRAIN_S = 5
_TICKS_BETWEEN_DEADLINES = 5
"""uvicorn ticks ten times a second."""


class HttpServer(uvicorn.Server):
    """Serves an application until ``should_exit`` is set.

    Args:
        app: The ASGI application to serve.
        limits: Deadlines and limits for its clients.
        certificate: The server's certificate; None serves plain HTTP.
        drain_s: How long requests may go on once ``should_exit`` is set, in seconds.
    """

    def __init__(
        self, app: App, limits: HttpLimits, *, certificate: ServerCertificate | None = None, drain_s: int = _DRAIN_S
    ) -> None:
        self._limits = limits
        self._acceptors: list[Acceptor] = []
        # Of uvicorn's parsers, only h11 limits the size of a head, and it is in every image.
        super().__init__(
            uvicorn.Config(
                cast("Any", _ends_with_early_answers(app)),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # otherwise a local client could choose its address in the access log
                ssl_context_factory=None if certificate is None else certificate.make_context,
                timeout_keep_alive=limits.keep_alive_s,
                timeout_graceful_shutdown=drain_s,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections on bound sockets. uvicorn's ``serve`` passes on its ``sockets``."""
        self._acceptors = [
            Acceptor(
                listener,
                make_protocol=self._make_protocol,
                limits=self._limits,
                tls=self.config.ssl,
            )
            for listener in sockets or ()
        ]
        self.servers = cast("Any", self._acceptors)
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Close connections whose client missed a deadline, besides uvicorn's own work. Called ten times a second."""
        if counter % _TICKS_BETWEEN_DEADLINES == 0:
            for acceptor in self._acceptors:
                acceptor.enforce_deadlines()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Install no signal handlers, where uvicorn would install its own: the caller handles signals."""
        yield

    def _make_protocol(self) -> Http:
        return Http(self.config, self.server_state, app_state={})


def _ends_with_early_answers(app: App) -> App:
    """Return an application that closes the connection after an answer that comes before the request is complete.

    The rest of the request would have to be parsed only to find its end, which costs far more than sending it.
    """

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = declared_length(scope) == 0

        async def watch() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole = not message.get("more_body", False)
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_whole:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await app(scope, watch, answer)

    return watched
