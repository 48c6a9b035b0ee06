"""The run API: one FastAPI application in front of the supervisor. Never imports torch.

    POST /v1/runs --validate--> Redis --wake--> run_supervisor.py --starts--> training rank
    GET  /v1/runs/...  <-- Redis and the run's directory

It stores nothing of its own: it shows Redis, the disk and the supervisor, so a restarted API shows the same runs.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from fastapi import FastAPI, Request
from pydantic import BaseModel

from services.trainer.problems import Problem, add_problem_handlers, documented
from services.trainer.run_api.about_routes import router as about_routes
from services.trainer.run_api.edit_route import router as edit_route
from services.trainer.run_api.model_routes import router as model_routes
from services.trainer.run_api.run_data_routes import router as data_routes
from services.trainer.run_api.run_routes import router as run_routes
from services.trainer.run_api.submit_route import router as submit_route
from services.trainer.run_api.trainer_api import TrainerApi
from services.trainer.run_api.upload_routes import router as upload_routes
from shared.access import entrance
from shared.access.keyring import Keyring
from shared.access.openapi_document import complete
from shared.access.route_table import TRAINER
from shared.errors import StateLostError, UnavailableError
from shared.redis.redis_connection import TRANSIENT
from shared.run_options.run_config import RunConfig
from shared.serving.http_guard import App
from shared.serving.http_limits import HttpLimits
from shared.serving.shared_answer import SharedAnswer

MAX_BODY_BYTES = 1024 * 1024
_READY_TIMEOUT_S = 1.0


def create_app(api: TrainerApi) -> FastAPI:
    """Return the application without the middleware that checks keys and limits."""
    app = FastAPI(
        title="headrace trainer",
        version="1",
        description="Submit GRPO runs, watch them, stop them. Errors are RFC 9457 problem+json.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.trainer = api
    app.state.why_not_ready = SharedAnswer(partial(_why_not_ready, api))
    add_problem_handlers(app)
    app.include_router(submit_route)
    app.include_router(run_routes)
    app.include_router(edit_route)
    app.include_router(data_routes)
    app.include_router(model_routes)
    app.include_router(upload_routes)
    app.include_router(about_routes)
    app.add_api_route("/livez", livez, tags=["health"])
    app.add_api_route("/readyz", readyz, tags=["health"], responses=documented(503))
    app.openapi = partial(_document, app.openapi)  # type: ignore[method-assign]
    return app


def guarded(app: FastAPI, keyring: Keyring, limits: HttpLimits) -> App:
    """Return the application behind the middleware that checks keys and limits."""
    return entrance.guarded(cast("App", app), routes=TRAINER, keyring=keyring, limits=limits)


class Health(BaseModel):
    """The body of a health check that passed."""

    status: str


def _document(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    made = make()
    config = RunConfig.document(ref_template="#/components/schemas/{model}")
    made["components"]["schemas"] |= config.pop("$defs", {}) | {"RunConfig": config}
    return complete(made, TRAINER)


async def livez() -> Health:
    """The event loop runs. Deliberately does not ask Redis: restarting this process would not help Redis."""
    return Health(status="alive")


async def readyz(request: Request) -> Health:
    """Redis answers within a second and has headrace's functions, and this process was not asked to stop."""
    reason: str | None = await request.app.state.why_not_ready()
    if reason is not None:
        raise Problem(503, "Not ready", reason)
    return Health(status="ready")


async def _why_not_ready(api: TrainerApi) -> str | None:
    if api.stopping.is_set():
        return "The trainer is shutting down."
    try:
        async with asyncio.timeout(_READY_TIMEOUT_S):
            libraries = await api.redis.function_list(library="headrace")
    except (*TRANSIENT, TimeoutError, UnavailableError, StateLostError):
        return "Redis does not answer."
    if not libraries:
        return (
            "Redis lacks headrace's functions: it has no room for them yet, or it was wiped; in that case restart the "
            "services."
        )
    return None
