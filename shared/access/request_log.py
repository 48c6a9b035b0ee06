"""Gives every HTTP request an id and a line in the access log, and every change a line in the audit log.

    headrace.access   "GET /v1/runs/run-... 200 in 3.1 ms, key ci, from 10.0.0.7"
    headrace.audit    "run.stop run-... by ci: done (202)"

It is in front of all layers that may refuse a request, so refused requests are logged too. The id is the header
X-Request-Id if that is valid, else a new one. The id is in the answer's header of that name, in every problem+json, and
in every log line that the request causes. Paths are logged percent-encoded; queries and other headers are not logged.
Probes, key checks (shared/health_check.py) and internal GET requests that succeed are logged at level DEBUG.
"""

import logging
import re
import secrets
import time
from urllib.parse import quote

from shared.access.route_table import INTERNAL, Found, RouteTable
from shared.service.current_request import CurrentRequest, enter, leave
from shared.service.logs import ACCESS_LOGGER, AUDIT_LOGGER
from shared.serving.http_guard import App, Message, Receive, Scope, Send

access_log = logging.getLogger(ACCESS_LOGGER)
audit_log = logging.getLogger(AUDIT_LOGGER)

HEADER = b"x-request-id"
_SANE_ID = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")
_METHOD = re.compile(r"[A-Z]{1,20}")
_MAX_SHOWN = 300
_FIRST_ERROR, _NO_ROUTE, _FIRST_FAILURE = 400, 404, 500
_KEY_CHECK = "/v1/"
"""A path without a route, which shared/health_check.py requests: only a known key gets to this answer."""


class RequestLog:
    """ASGI middleware that gives requests their ids, and writes the access log and the audit log.

    Args:
        app: The service's application, with its key check.
        routes: The service's routes. A route with an ``action`` changes something.
    """

    def __init__(self, app: App, *, routes: RouteTable) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a request id, and log it when it has been answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = CurrentRequest(_request_id(scope))
        request_id = request.request_id.encode()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                others = [header for header in message.get("headers", ()) if header[0].lower() != HEADER]
                message = {**message, "headers": [*others, (HEADER, request_id)]}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                request.is_whole = True

        entered, began_at = enter(request), time.perf_counter()
        try:
            await self._app(scope, receive, answer)
        finally:
            self._write(scope, request, duration_ms=1000 * (time.perf_counter() - began_at))
            leave(entered)

    def _write(self, scope: Scope, request: CurrentRequest, *, duration_ms: float) -> None:
        method = str(scope["method"])
        found = self._routes.find(method, str(scope["path"]))
        shown = {
            "method": method if _METHOD.fullmatch(method) else "?",
            "path": _safe(str(scope["path"])),
            "status": request.status,
            "duration_ms": round(duration_ms, 1),
            "key": request.key_name,
            "client": _safe(str((scope.get("client") or ("-",))[0])),
        }
        cut = "" if request.is_whole else ", cut off"
        access_log.log(
            logging.DEBUG if _is_routine(scope, found, request) else logging.INFO,
            "%(method)s %(path)s %(status)d in %(duration_ms).1f ms, key %(key)s, from %(client)s" + cut,
            shown,
            extra={"fields": shown | {"is_whole": request.is_whole}},
        )
        subject = request.subject or found.subject
        # An accepted request without a subject, such as a dry run, changes nothing.
        if found.route is not None and found.route.action and (subject or request.status >= _FIRST_ERROR):
            told = {
                "action": found.route.action,
                "subject": _safe(subject) or "-",
                "key": request.key_name,
                "outcome": _outcome(request),
                "status": request.status,
            }
            audit_log.info("%(action)s %(subject)s by %(key)s: %(outcome)s (%(status)d)", told, extra={"fields": told})


def _request_id(scope: Scope) -> str:
    sent: bytes = next((value for name, value in scope["headers"] if name.lower() == HEADER), b"")
    return sent.decode() if _SANE_ID.fullmatch(sent) else secrets.token_hex(8)


def _is_routine(scope: Scope, found: Found, request: CurrentRequest) -> bool:
    if scope["path"] == _KEY_CHECK and request.status == _NO_ROUTE and request.is_whole:
        return True
    if found.route is None or request.status >= _FIRST_ERROR or not request.is_whole:
        return False
    return found.route.needs is None or (found.route.needs == INTERNAL and found.route.method == "GET")


def _outcome(request: CurrentRequest) -> str:
    if not request.status or request.status >= _FIRST_FAILURE:
        return "failed"
    return "refused" if request.status >= _FIRST_ERROR else "done"


def _safe(text: str) -> str:
    """Return a client's text as bounded ASCII on one line, percent-encoded so that it cannot imitate a log line."""
    shown = quote(text, safe="/:@-._~", errors="replace")
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
