"""Rewrites problem+json errors into the error format of another protocol, such as OpenAI's.

    {"type": "/problems/session-over", "title": ..., "status": 410, "detail": "..."}
    OpenAI:  {"error": {"type": "invalid_request_error", "code": "session_over", "message": "...", "param": null}}

Clients of such a protocol read only its own form, but all layers before an application answer with problem+json.
"""

import json
from collections.abc import Callable
from typing import Any, cast

from shared.access.openapi_document import PROBLEM_JSON
from shared.serving.http_guard import App, Message, Receive, Scope, Send

Form = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes a problem and returns the body to send instead."""

_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_FIRST_FAILURE = 500


class RewrittenProblems:
    """ASGI middleware that rewrites problem+json answers. It is the outermost layer, to see the errors of all others.

    Args:
        app: The application with its guards.
        form_of: Returns the function that rewrites a request's errors; None to leave them as they are.
        media_type: Content type of the rewritten bodies.
    """

    def __init__(self, app: App, form_of: Callable[[Scope], Form | None], *, media_type: str) -> None:
        self._app = app
        self._form_of = form_of
        self._media_type = media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and rewrite its answer if that is problem+json."""
        form = self._form_of(scope) if scope["type"] == "http" else None
        if form is None:
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        data = b""

        async def rewrite(message: Message) -> None:
            nonlocal start, data
            if message["type"] == "http.response.start" and _is_problem(message):
                start = message
            elif start is None:
                await send(message)
            else:
                data += message.get("body", b"")
                if not message.get("more_body", False):
                    await self._send(send, start, json.dumps(form(json.loads(data))).encode() if data else b"")  # HEAD

        await self._app(scope, receive, rewrite)

    async def _send(self, send: Send, start: Message, data: bytes) -> None:
        replaced = (b"content-type", b"content-length")
        headers = [
            (b"content-type", self._media_type.encode()),
            (b"content-length", str(len(data)).encode()),
            *((name, value) for name, value in start.get("headers", []) if name.lower() not in replaced),
        ]
        await send({**start, "headers": headers})
        await send({"type": "http.response.body", "body": data})


def openai_error(problem: dict[str, Any]) -> dict[str, Any]:
    """Return the body of OpenAI's error format for a problem+json body. The problem's type becomes the code."""
    kind = error_type(problem, _OPENAI_TYPES, "server_error")
    return {"error": {"type": kind, "code": error_code(problem), "message": problem["detail"], "param": None}}


def error_type(problem: dict[str, Any], types: dict[int, str], failure: str) -> str:
    """Return an error type for the problem's status.

    It is the type in ``types``, else ``failure`` from 500 on, and ``invalid_request_error`` below.
    """
    status = problem["status"]
    return types.get(status, failure if status >= _FIRST_FAILURE else "invalid_request_error")


def error_code(problem: dict[str, Any]) -> str:
    """Return an error code for a problem: ``session_over`` for the type ``/problems/session-over``."""
    return str(problem["type"]).rpartition("/")[2].replace("-", "_")


def _is_problem(start: Message) -> bool:
    headers = cast("list[tuple[bytes, bytes]]", start.get("headers", []))
    return any(name.lower() == b"content-type" and value == PROBLEM_JSON.encode() for name, value in headers)
