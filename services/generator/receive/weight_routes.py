"""The weight push over HTTP: bodies of shared/control.py, answered by ``WeightReceiver``.

    409  another run, an older epoch, out of turn        422  malformed (app.py answers)
    503  no engine yet, or the update failed

Only the trainer calls these routes. They need the internal key, which is checked in front of the application.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from services.generator.receive.weight_receiver import ConflictError, WeightReceiver
from shared.control import (
    WEIGHTS_PATH,
    AbortRequest,
    BeginRequest,
    CommitReply,
    CommitRequest,
    JoinRequest,
    ReplicaInfo,
    SleepRequest,
)
from shared.errors import PushError, UnavailableError
from shared.serving.http_guard import problem


def make_router(receiver: WeightReceiver) -> APIRouter:
    """Return the weight routes of ``receiver``."""
    router = APIRouter(prefix=WEIGHTS_PATH, route_class=_ProblemRoute, tags=["weights"])

    @router.get("")
    async def info() -> ReplicaInfo:
        return receiver.info()

    @router.post("/join")
    async def join(body: JoinRequest) -> ReplicaInfo:
        return await receiver.join(body)

    @router.post("/begin")
    async def begin(body: BeginRequest) -> ReplicaInfo:
        return await receiver.begin(body)

    @router.post("/commit")
    async def commit(body: CommitRequest) -> CommitReply:
        return await receiver.commit(body)

    @router.post("/abort")
    async def abort(body: AbortRequest) -> ReplicaInfo:
        return await receiver.abort(body)

    @router.post("/sleep")
    async def sleep(body: SleepRequest) -> ReplicaInfo:
        return await receiver.sleep(body)

    return router


class _ProblemRoute(APIRoute):
    """Answers errors as problem+json."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except ConflictError as error:
                return _reply(problem(409, "Out of turn", str(error)))
            except UnavailableError as error:
                return _reply(problem(503, "Not ready", str(error)))
            except PushError as error:
                return _reply(problem(503, "Push failed", str(error)))

        return handled


def _reply(body: dict[str, Any]) -> Response:
    return JSONResponse(body, status_code=body["status"], media_type="application/problem+json")
