"""Serves /metrics on a port of its own, from a thread of its own: a busy event loop can still be watched."""

import contextlib
import threading
from collections.abc import Generator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer

from shared.listening import METRICS, listening_socket


@contextlib.contextmanager
def serving_metrics(registry: CollectorRegistry, *, host: str, port: int) -> Generator[None]:
    """Serve while the body runs; port 0 serves nothing.

    Raises:
        UserError: The port is taken.
    """
    if port == 0:
        yield
        return
    server = ThreadingWSGIServer((host, port), _SilentHandler, bind_and_activate=False)
    server.socket.close()  # unbound; prometheus_client takes no socket of ours
    server.socket = listening_socket(host, port, name=METRICS)
    server.server_name, server.server_port = host, server.socket.getsockname()[1]
    server.setup_environ()
    library: Any = prometheus_client  # partly untyped
    server.set_app(library.make_wsgi_app(registry))
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """Say nothing of each scrape."""
