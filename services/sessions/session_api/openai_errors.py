"""Gives every error of a session's routes OpenAI's form, from whichever layer it comes.

    {"type": "/problems/session-over", "title": ..., "status": 410, "detail": "..."}
    --> {"error": {"message": "...", "type": "invalid_request_error", "param": null, "code": "session_over"}}

Clients of OpenAI's protocol show only this form. All layers before the application answer with problem+json.
"""

import json
from typing import Any, cast

from services.sessions.open_sessions import SESSIONS_PATH
from shared.access.openapi_document import PROBLEM_JSON
from shared.serving.http_guard import App, Message, Receive, Scope, Send

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_FIRST_FAILURE = 500


class OpenAiErrors:
    """ASGI middleware, in front of all others.

    Args:
        app: The application with its guards.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and translate a problem that it is answered with."""
        if scope["type"] != "http" or not str(scope["path"]).startswith(f"{SESSIONS_PATH}/"):
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
                    await _send_error(send, start, json.loads(data) if data else {})

        await self._app(scope, receive, translate)


def openai_error(problem: dict[str, Any]) -> dict[str, Any]:
    """Return a problem in OpenAI's form. Its type becomes the code."""
    status = int(problem.get("status", _FIRST_FAILURE))
    kind = _TYPES.get(status, "server_error" if status >= _FIRST_FAILURE else "invalid_request_error")
    code = str(problem.get("type", "")).rpartition("/")[2].replace("-", "_")
    return {"error": {"message": problem.get("detail", ""), "type": kind, "param": None, "code": code}}


def _is_problem(start: Message) -> bool:
    headers = cast("list[tuple[bytes, bytes]]", start.get("headers", []))
    return any(name.lower() == b"content-type" and value == PROBLEM_JSON.encode() for name, value in headers)


async def _send_error(send: Send, start: Message, problem: dict[str, Any]) -> None:
    data = json.dumps(openai_error(problem)).encode() if problem else b""  # HEAD has no body
    replaced = (b"content-type", b"content-length")
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
        *((name, value) for name, value in start.get("headers", []) if name.lower() not in replaced),
    ]
    await send({**start, "headers": headers})
    await send({"type": "http.response.body", "body": data})
