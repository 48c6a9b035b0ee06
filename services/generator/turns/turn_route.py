"""HTTP route ``POST /internal/v1/turns``, which samples turns of conversations; shared/turns.py has the bodies.

    200  with one line per turn        409  another run is served
    422  the body is malformed         503  the replica is not ready

Only the sessions service calls it. It needs the internal key, which is checked in front of the application. If the
client disconnects, turns that were not sent yet are aborted.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from services.generator.turns.turn_answers import TurnAnswers
from services.generator.turns.turn_sampler import TurnDesk
from shared.errors import MessageError, UnavailableError
from shared.serving.http_guard import Receive, Scope, Send, problem
from shared.turns import TURN_PATH, RefusalKind, TurnRefusedError, decode_turn_requests

_RETRY_AFTER = {"Retry-After": "1"}


def make_turn_router(desk: TurnDesk) -> APIRouter:
    """Return a router with ``POST /internal/v1/turns``; ``desk`` samples the turns."""
    router = APIRouter(tags=["turns"])

    @router.post(TURN_PATH, response_model=None)
    async def sample_turns(request: Request) -> Response:
        try:
            return _Lines(desk.sample(decode_turn_requests(await request.body())))
        except MessageError as error:
            return _refuse(422, str(error), kind="malformed")
        except TurnRefusedError as error:
            return _refuse(409, str(error), kind=error.kind)
        except UnavailableError as error:
            return _answer(problem(503, "Not ready", f"{error}."), _RETRY_AFTER)

    return router


class _Lines(StreamingResponse):
    """Streaming response with one line for each turn. Sampling ends once all are sent, or the client disconnects."""

    def __init__(self, answers: TurnAnswers) -> None:
        super().__init__(answers.lines(), media_type="application/jsonl")
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self._answers):
            await super().__call__(scope, receive, send)


def _refuse(status: int, reason: str, *, kind: RefusalKind) -> JSONResponse:
    return _answer(problem(status, "Turns refused", f"{reason}.", kind=kind))


def _answer(body: dict[str, Any], headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(body, body["status"], headers, media_type="application/problem+json")
