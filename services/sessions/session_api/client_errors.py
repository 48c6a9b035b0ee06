"""Gives every error of a session's routes the form of the route's protocol, from whichever layer it comes.

    {"type": "/problems/session-over", "title": ..., "status": 410, "detail": "..."}
    OpenAI:     {"error": {"type": "invalid_request_error", "code": "session_over", "message": "...", "param": null}}
    Anthropic:  {"type": "error", "error": {"type": "invalid_request_error", "code": "session_over", "message": "..."}}

Clients show only the form of their protocol. All layers before the application answer with problem+json. Other paths
below a session have OpenAI's form.
"""

import json
from collections.abc import Callable
from typing import Any, cast

from services.sessions.open_sessions import SESSIONS_PATH
from shared.access.openapi_document import PROBLEM_JSON
from shared.access.route_table import SESSIONS
from shared.serving.http_guard import App, Message, Receive, Scope, Send

_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {404: "not_found_error", 413: "request_too_large"}
_FIRST_FAILURE = 500


class ClientErrors:
    """ASGI middleware, in front of all others.

    Args:
        app: The application with its guards.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and translate a problem that it is answered with."""
        form = _form_of(scope) if scope["type"] == "http" else None
        if form is None:
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        data = b""

        async def translate(message: Message) -> None:
            nonlocal start, data
            if message["type"] == "http.response.start" and _is_problem(message):
                start = message
            elif start is None:
                await send(message)
            else:
                data += message.get("body", b"")
                if not message.get("more_body", False):
                    await _send(send, start, json.dumps(form(json.loads(data))).encode() if data else b"")  # HEAD

        await self._app(scope, receive, translate)


def openai_error(problem: dict[str, Any]) -> dict[str, Any]:
    """Return a problem in OpenAI's form. Its type becomes the code."""
    kind = _type(problem, _OPENAI_TYPES, "server_error")
    return {"error": {"type": kind, "code": _code(problem), "message": problem["detail"], "param": None}}


def anthropic_error(problem: dict[str, Any]) -> dict[str, Any]:
    """Return a problem in Anthropic's form. Its type becomes the code, which Anthropic's own errors do not have."""
    kind = _type(problem, _ANTHROPIC_TYPES, "api_error")
    return {"type": "error", "error": {"type": kind, "code": _code(problem), "message": problem["detail"]}}


_FORMS = {"openai": openai_error, "anthropic": anthropic_error}


def _form_of(scope: Scope) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """Return the form of a request's errors; None for problem+json."""
    path = str(scope["path"])
    route = SESSIONS.find(str(scope["method"]), path).route
    if route is None:
        return openai_error if path.startswith(f"{SESSIONS_PATH}/") else None
    return _FORMS.get(route.errors)


def _type(problem: dict[str, Any], types: dict[int, str], failure: str) -> str:
    status = problem["status"]
    return types.get(status, failure if status >= _FIRST_FAILURE else "invalid_request_error")


def _code(problem: dict[str, Any]) -> str:
    return str(problem["type"]).rpartition("/")[2].replace("-", "_")


def _is_problem(start: Message) -> bool:
    headers = cast("list[tuple[bytes, bytes]]", start.get("headers", []))
    return any(name.lower() == b"content-type" and value == PROBLEM_JSON.encode() for name, value in headers)


async def _send(send: Send, start: Message, data: bytes) -> None:
    replaced = (b"content-type", b"content-length")
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
        *((name, value) for name, value in start.get("headers", []) if name.lower() not in replaced),
    ]
    await send({**start, "headers": headers})
    await send({"type": "http.response.body", "body": data})
