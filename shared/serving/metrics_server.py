"""Serves /metrics on its own port from its own thread, so that metrics can be read while the event loop is busy."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Generator
from typing import cast

from prometheus_client import CollectorRegistry, make_asgi_app  # pyright: ignore[reportUnknownVariableType]

from shared.serving.http_guard import App, HttpGuard
from shared.serving.http_limits import HttpLimits, that_fit
from shared.serving.http_server import HttpServer
from shared.serving.listening import METRICS, listening_socket

_LIMITS = HttpLimits(max_connections=256, max_requests=64, max_body_bytes=0)
"""Few clients scrape, and none sends a body."""
_STOP_S = 5.0


@contextlib.contextmanager
def serving_metrics(registry: CollectorRegistry, *, host: str, port: int) -> Generator[None]:
    """Serve metrics while the body runs. Port 0 serves nothing.

    Raises:
        UserError: The port is taken.
    """
    if port == 0:
        yield
        return
    listener = listening_socket(host, port, name=METRICS)
    limits = that_fit(_LIMITS)
    server = HttpServer(HttpGuard(cast("App", make_asgi_app(registry)), limits), limits, drain_s=1)
    thread = threading.Thread(target=_serve, args=(server, listener), name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(timeout=_STOP_S)


def _serve(server: HttpServer, listener: socket.socket) -> None:
    with listener:
        asyncio.run(server.serve(sockets=[listener]))
