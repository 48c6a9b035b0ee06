"""The generator's HTTP application: health, the weight routes for the trainer, the policy for everyone with a key.

    /livez  /readyz  /health open
    /internal/v1/...         internal key
    /v1/...                  API key; access/route_table.py has the scopes

It is up before vLLM is, so that what the replica waits for can be asked.
"""

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route

from services.generator.openai_routes import PATHS, OpenAiRoutes
from services.generator.service_state import ServiceState
from services.generator.settings import GeneratorSettings
from shared.about import ABOUT_PATH, INTERNAL_ABOUT_PATH, About, about
from shared.access import entrance
from shared.access.keyring import Keyring
from shared.access.route_table import GENERATOR
from shared.http_guard import App, Message, Receive, Scope, Send, declared_length, problem, reply
from shared.json_body import BodyError, refuse_nested

_MAX_NESTED = 50_000


def make_app(
    settings: GeneratorSettings,
    *,
    keyring: Keyring,
    state: ServiceState,
    openai: OpenAiRoutes,
    weight_routes: APIRouter,
    engine_check: APIRouter | None = None,
    replica_id: str = "",
) -> App:
    """Return the guarded application; ``replica_id`` is that of the settings if left out."""
    app = FastAPI(title="headrace generator", docs_url=None, redoc_url=None)
    app.include_router(weight_routes)
    if engine_check is not None:
        app.include_router(engine_check)
    app.router.routes.extend(Route(path, openai, methods=methods) for path, methods in PATHS.items())

    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    async def readyz() -> JSONResponse:
        reason = state.why_not_ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        status = "starting" if state.is_starting else "waiting"
        return JSONResponse({"status": status, "reason": reason}, status_code=503)

    async def health() -> Response:
        # What clients of vLLM's server wait for before their first request: that the policy can answer.
        return Response(status_code=200 if state.why_policy_closed() is None else 503)

    async def about_generator() -> About:
        return about("generator", replica_id=replica_id or settings.name)

    app.add_api_route("/livez", livez)
    app.add_api_route(ABOUT_PATH, about_generator)
    app.add_api_route(INTERNAL_ABOUT_PATH, about_generator)
    app.add_api_route("/health", health, response_model=None)
    app.add_api_route("/readyz", readyz, response_model=None)
    app.add_exception_handler(HTTPException, _refuse)
    return entrance.guarded(_Bounded(app), routes=GENERATOR, keyring=keyring, limits=settings.http_limits())


class _Bounded:
    """Hands on bodies that are whole, and hold no more lists and tables than can be decoded in no time.

    It stands in front of vLLM's routes, too.
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
                return  # HttpGuard says why
            pieces.append(message.get("body", b""))
            is_whole = not message.get("more_body", False)
        body = b"".join(pieces)
        try:
            refuse_nested(body, max_nested=_MAX_NESTED)
        except BodyError as error:
            await reply(send, problem(error.status, error.title, error.detail))
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, again, send)


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    body = problem(error.status_code, str(error.detail), f"{error.detail}.")
    return JSONResponse(body, error.status_code, error.headers, media_type="application/problem+json")
