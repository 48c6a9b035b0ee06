"""HTTP routes of the weight push, with the bodies of shared/control.py. ``WeightReceiver`` answers them.

    409  the body is for another run or an older epoch, is out of turn, or does not fit this replica
    422  the body is malformed (app.py answers)
    503  no engine is there yet, or the update failed

Only the trainer calls these routes. They need the internal key, which is checked in front of the application.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from services.generator.receive.weight_receiver import WeightReceiver
from services.generator.receive.weight_swap import ConflictError, WeightSwap
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
    """Return a router with the routes of the weight push, which pass each request to ``receiver``."""
    router = APIRouter(prefix=WEIGHTS_PATH, route_class=_ProblemRoute, tags=["weights"])

    @router.get("")
    async def info() -> ReplicaInfo:
        return receiver.info()

    @router.post("/join")
    async def join(body: JoinRequest) -> ReplicaInfo:
        return await receiver.join(body)

    @router.post("/begin")
    async def begin(body: BeginRequest) -> ReplicaInfo:
        return await receiver.make(body, WeightSwap.begin)

    @router.post("/commit")
    async def commit(body: CommitRequest) -> CommitReply:
        return await receiver.make(body, WeightSwap.commit)

    @router.post("/abort")
    async def abort(body: AbortRequest) -> ReplicaInfo:
        return await receiver.make(body, WeightSwap.abort)

    @router.post("/sleep")
    async def sleep(body: SleepRequest) -> ReplicaInfo:
        return await receiver.make(body, WeightSwap.sleep)

    return router


class _ProblemRoute(APIRoute):
    """Route that answers PushError and UnavailableError with problem+json: 409 or 503."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, with PushError and UnavailableError turned into problem+json."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except (PushError, UnavailableError) as error:
                body = problem(*_answer(error), str(error))
                return JSONResponse(body, status_code=body["status"], media_type="application/problem+json")

        return handled


def _answer(error: PushError | UnavailableError) -> tuple[int, str]:
    if isinstance(error, ConflictError):
        return 409, "Out of turn"
    return 503, "Push failed" if isinstance(error, PushError) else "Not ready"
