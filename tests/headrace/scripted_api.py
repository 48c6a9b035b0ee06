"""A real HTTP server that sends the responses of a test's script, and records the requests."""

import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG_UP = object()
"""A response: close the connection without one."""


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """One response."""

    status: int = 200
    body: bytes = b"{}"
    content_type: str = "application/json"
    location: str = ""


@dataclass
class ScriptedApi:
    """Answers with what `script` returns for a request: a JSON value, an Answer, or HANG_UP."""

    script: Callable[[Asked], Any]
    asked: list[Asked] = field(default_factory=list[Asked])
    url: str = ""
    clock_ahead_s: float = 0.0
    """Seconds by which its Date header is ahead of its clock."""


def problem(status: int, detail: str, *, kind: str = "x") -> Answer:
    """Return a problem+json answer."""
    body = json.dumps({"type": f"/problems/{kind}", "title": "X", "status": status, "detail": detail}).encode()
    return Answer(status=status, body=body, content_type="application/problem+json")


def event_stream(*events: tuple[str, str, dict[str, Any]]) -> Answer:
    """Return a stream of (id, kind, data) that breaks off at its end."""
    text = "retry: 2000\n\n: still here\n\n"
    for event_id, kind, data in events:
        text += (f"id: {event_id}\n" if event_id else "") + f"event: {kind}\ndata: {json.dumps(data)}\n\n"
    return Answer(body=text.encode(), content_type="text/event-stream")


@contextmanager
def serving(script: Callable[[Asked], Any]) -> Generator[ScriptedApi]:
    """Serve a script on a free port of loopback."""
    api = ScriptedApi(script)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def do_PATCH(self) -> None:
            self._answer()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string((timestamp or time.time()) + api.clock_ahead_s)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  http.server's own name
            pass

        def _answer(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            asked = Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            api.asked.append(asked)
            answer = api.script(asked)
            if answer is HANG_UP:
                return
            if not isinstance(answer, Answer):
                answer = Answer(body=json.dumps(answer).encode())
            self.send_response(answer.status)
            self.send_header("content-type", answer.content_type)
            if answer.location:
                self.send_header("location", answer.location)
            self.end_headers()
            self.wfile.write(answer.body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    api.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="scripted API")
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
