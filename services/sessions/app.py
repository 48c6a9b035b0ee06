"""The FastAPI application of the sessions service: health checks, releases, the check of tools, and sessions.

GET /livez, /readyz         need no key, carry no data
GET /v1/about               installed releases: shared/service/about.py
POST /v1/tools/check        imports the tools of a run when it is submitted: tool_check.py
/v1/sessions/...            conversations in which the policy takes turns: session_api/
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from services.sessions.open_sessions import OpenSessions
from services.sessions.session_api.session_routes import add_session_routes, body_schemas
from services.sessions.tool_check import Check, tool_check_router
from shared.access.openapi_document import PROBLEM_JSON, complete, responses
from shared.access.route_table import SESSIONS
from shared.errors import UserError
from shared.service.about import ABOUT_PATH, INTERNAL_ABOUT_PATH, About, about
from shared.serving.http_guard import problem
from shared.serving.json_body import BodyError

NotReady = Callable[[], Awaitable[str | None]]
"""Returns the reason why the service is not ready, or None if it is."""


class Health(BaseModel):
    """The body of a health check that passed."""

    status: str


def build_app(*, why_not_ready: NotReady, check_tools: Check, sessions: OpenSessions, replica_id: str) -> FastAPI:
    """Return the FastAPI application. The caller adds access control and the limits of HTTP requests."""
    app = FastAPI(title="headrace sessions", version="1", docs_url=None, redoc_url=None)
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(BodyError, _body_error)
    app.add_exception_handler(UserError, _unusable_tools)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _bug)
    app.openapi = partial(_document, app.openapi)  # type: ignore[method-assign]

    @app.get("/livez", summary="The event loop is running")
    async def livez() -> Health:
        return Health(status="alive")

    @app.get(
        "/readyz",
        summary="Redis answers, and tools can be called",
        response_model=Health,
        responses=responses({503: "Not yet, or not now"}),
    )
    async def readyz() -> JSONResponse:
        reason = await why_not_ready()
        if reason is not None:
            return _answer(problem(503, "Not ready", reason))
        return JSONResponse({"status": "ready"})

    async def about_sessions() -> About:
        """Report this replica's installed releases and its number of GPUs."""
        return about("sessions", replica_id=replica_id)

    add_session_routes(app, sessions)
    app.include_router(tool_check_router(check_tools))
    app.add_api_route(ABOUT_PATH, about_sessions)
    app.add_api_route(INTERNAL_ABOUT_PATH, about_sessions, include_in_schema=False)
    return app


def _document(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    document = make()
    document.setdefault("components", {}).setdefault("schemas", {}).update(body_schemas())
    return complete(document, SESSIONS)


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _answer(problem(error.status_code, str(error.detail), f"{error.detail}."))


async def _body_error(_: Request, error: Exception) -> JSONResponse:
    found = cast("BodyError", error)
    return _answer(problem(found.status, found.title, found.detail))


async def _unusable_tools(_: Request, error: Exception) -> JSONResponse:
    return _answer(problem(422, "Unusable tools", str(error)))


async def _client_gone(_: Request, _error: Exception) -> JSONResponse:
    """Return an answer that no client reads, so that a disconnect is not logged as an error of the service."""
    return _answer(problem(400, "Incomplete body", "The connection was closed before the body was whole."))


async def _bug(_: Request, error: Exception) -> JSONResponse:
    detail = f"The sessions service failed with {type(error).__name__}; its log says where."
    return _answer(problem(500, "Internal error", detail))


def _answer(body: dict[str, Any]) -> JSONResponse:
    return JSONResponse(body, body["status"], media_type=PROBLEM_JSON)
