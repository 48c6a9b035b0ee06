"""``POST /internal/v1/turns``: one turn of a conversation, as shared/turns.py describes it.

    409  another run is served        422  refused, with the kind of refusal        503  not ready, or the engine failed

Only the sessions service calls it. It needs the internal key, which is checked in front of the application.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from services.generator.engine.engine import EngineDiedError
from services.generator.hang_up import HUNG_UP, unless_hung_up
from services.generator.turns.turn_sampler import TurnDesk
from shared.errors import MessageError, UnavailableError
from shared.serving.http_guard import problem
from shared.turns import TURN_PATH, RefusalKind, TurnRefusedError, decode_turn_request, encode_turn

_RETRY_AFTER = {"Retry-After": "1"}


def make_turn_router(desk: TurnDesk) -> APIRouter:
    """Return the route that samples turns at ``desk``."""
    router = APIRouter(tags=["turns"])

    @router.post(TURN_PATH, response_model=None)
    async def sample_turn(request: Request) -> Response:
        try:
            turn = decode_turn_request(await request.body())
        except MessageError as error:
            return _refuse(str(error), kind="malformed")
        try:
            sampled = await unless_hung_up(request.receive, desk.sample(turn))
        except TurnRefusedError as error:
            return _refuse(str(error), kind=error.kind)
        except MessageError as error:
            return _refuse(str(error), kind="sampling")
        except (UnavailableError, EngineDiedError) as error:
            return _answer(problem(503, "Not ready", f"{error}."), _RETRY_AFTER)
        if sampled is None:
            return _answer(problem(HUNG_UP, "Hung up", "The client disconnected."))
        return Response(encode_turn(sampled), media_type="application/json")

    return router


def _refuse(reason: str, *, kind: RefusalKind) -> JSONResponse:
    return _answer(problem(409 if kind == "another_run" else 422, "Turn refused", f"{reason}.", kind=kind))


def _answer(body: dict[str, Any], headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(body, body["status"], headers, media_type="application/problem+json")
