"""The generator's HTTP application: health checks, weight routes for the trainer, and policy routes for API clients.

    /livez  /readyz  /health   need no key
    /internal/v1/...           needs the internal key
    /v1/...                    needs an API key; shared/access/route_table.py has the scopes

The server starts before vLLM is loaded, so that /readyz can say what the replica is waiting for.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from services.generator.policy_api.generate_route import GENERATE_PATH, refuse_body
from services.generator.policy_api.openai_routes import PATHS, OpenAiRoutes
from services.generator.policy_api.openapi_document import document
from services.generator.service_state import ServiceState
from services.generator.settings import GeneratorSettings
from shared.access import entrance
from shared.access.keyring import Keyring
from shared.access.openapi_document import PROBLEM_JSON, responses
from shared.access.problem_forms import Form, RewrittenProblems, openai_error
from shared.access.route_table import GENERATOR
from shared.service.about import ABOUT_PATH, INTERNAL_ABOUT_PATH, About, about
from shared.serving.http_guard import App, Message, Receive, Scope, Send, declared_length, problem, reply
from shared.serving.json_body import BodyError, refuse_nested

_MAX_NESTED = 50_000


def make_app(
    settings: GeneratorSettings,
    *,
    keyring: Keyring,
    state: ServiceState,
    openai: OpenAiRoutes,
    weight_routes: APIRouter,
    turn_routes: APIRouter,
    engine_check: APIRouter | None = None,
    replica_id: str = "",
) -> App:
    """Return the generator's ASGI application, behind the checks of keys, body sizes and nesting.

    ``replica_id`` is the name that /v1/about reports. It defaults to the name in the settings.
    """
    app = FastAPI(title="headrace generator", docs_url=None, redoc_url=None)
    app.include_router(weight_routes)
    app.include_router(turn_routes)
    if engine_check is not None:
        app.include_router(engine_check)
    app.router.routes.extend(Route(path, openai, methods=methods) for path, methods in PATHS.items())

    async def livez() -> Health:
        """Answer 200 as long as the event loop is running."""
        return Health(status="alive")

    async def readyz() -> Health:
        """Answer 200 if the replica holds the policy version that the run requires, otherwise 503 with the reason."""
        reason = state.why_not_ready()
        if reason is not None:
            raise NotReadyError(reason, phase="starting" if state.is_starting else "waiting")
        return Health(status="ready")

    async def health() -> Health:
        """Answer 200 if the policy can answer, otherwise 503. Clients of vLLM's server wait for 200 before they ask."""
        reason = state.why_policy_closed()
        if reason is not None:
            raise NotReadyError(state.why_not_ready() or "the policy cannot answer", phase="waiting")
        return Health(status="ready")

    async def about_generator() -> About:
        """Report this replica's installed releases and its number of GPUs."""
        return about("generator", replica_id=replica_id or settings.name)

    not_ready = responses({503: "Not ready; reason says what it is waiting for"})
    app.add_api_route("/livez", livez, tags=["health"])
    app.add_api_route("/readyz", readyz, tags=["health"], responses=not_ready)
    app.add_api_route("/health", health, tags=["health"], responses=not_ready)
    app.add_api_route(ABOUT_PATH, about_generator, tags=["about"])
    app.add_api_route(INTERNAL_ABOUT_PATH, about_generator, include_in_schema=False)
    for kind, handler in (
        (NotReadyError, _say_not_ready),
        (HTTPException, _refuse),
        (RequestValidationError, refuse_body),
        (ClientDisconnect, _client_gone),
        (Exception, _bug),
    ):
        app.add_exception_handler(kind, handler)
    app.openapi = partial(document, app)  # type: ignore[method-assign]
    guarded = entrance.guarded(_Bounded(app), routes=GENERATOR, keyring=keyring, limits=settings.http_limits())
    return RewrittenProblems(guarded, _form_of, media_type=PROBLEM_JSON)


def _form_of(scope: Scope) -> Form | None:
    """Return the function that rewrites a request's error bodies, or None to leave them as problem+json.

    On OpenAI's routes, the function adds the `error` object that OpenAI's clients read.
    """
    is_openai = scope["path"] in PATHS and scope["path"] != GENERATE_PATH
    return _with_openai_error if is_openai else None


def _with_openai_error(body: dict[str, Any]) -> dict[str, Any]:
    return body | openai_error(body)


class _Bounded:
    """ASGI middleware that reads each body completely, and answers 422 if it has too many lists, objects or values.

    Decoding such a body would take long. vLLM's routes are protected in the same way.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or declared_length(scope) == 0:
            await self._app(scope, receive, send)
            return
        pieces: list[bytes] = []
        is_whole = False
        while not is_whole:
            message = await receive()
            if message["type"] == "http.disconnect":
                return  # HttpGuard logs the reason
            pieces.append(message.get("body", b""))
            is_whole = not message.get("more_body", False)
        body = b"".join(pieces)
        try:
            refuse_nested(body, max_nested=_max_nested(scope))
        except BodyError as error:
            await reply(send, problem(error.status, error.title, error.detail))
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, again, send)


def _max_nested(scope: Scope) -> int:
    route = GENERATOR.find(str(scope["method"]), str(scope["path"])).route
    return _MAX_NESTED if route is None or route.max_nested is None else route.max_nested


class Health(BaseModel):
    """The body of a health check that passed."""

    status: str


class NotReadyError(Exception):
    """Makes /readyz and /health answer 503 with the reason; ``phase`` is ``starting`` or ``waiting``."""

    def __init__(self, reason: str, *, phase: str) -> None:
        super().__init__(reason)
        self.phase = phase


async def _say_not_ready(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, NotReadyError)
    return _answer(problem(503, "Not ready", f"{error}.", reason=str(error), phase=error.phase))


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _answer(problem(error.status_code, str(error.detail), f"{error.detail}."), error.headers)


async def _client_gone(_: Request, _error: Exception) -> JSONResponse:
    """Answer a client that has disconnected. Without this handler, the log would report an error of the generator."""
    return _answer(problem(400, "Incomplete body", "The connection was closed before the body was whole."))


async def _bug(_: Request, error: Exception) -> JSONResponse:
    return _answer(
        problem(500, "Internal error", f"The generator failed with {type(error).__name__}; its log says where.")
    )


def _answer(body: dict[str, Any], headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(body, body["status"], headers, media_type=PROBLEM_JSON)
