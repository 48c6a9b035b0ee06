"""The engine check over HTTP; shared/engine_check.py defines the bodies. The route needs the internal key."""

from typing import Annotated

from fastapi import APIRouter, Body
from fastapi.responses import JSONResponse

from services.generator.engine.engine_check import EngineChecker
from shared.engine_check import ENGINE_CHECK_PATH, EngineCheck, EngineVerdict
from shared.errors import UnavailableError
from shared.serving.http_guard import problem


def make_check_router(checker: EngineChecker) -> APIRouter:
    """Return the route: 200 with a verdict, or 503 if vLLM gave none."""
    router = APIRouter(tags=["engine"])

    @router.post(ENGINE_CHECK_PATH, response_model=None)
    async def check(body: Annotated[EngineCheck, Body()]) -> EngineVerdict | JSONResponse:
        try:
            return await checker.check(body.config)
        except UnavailableError as error:
            answer = problem(503, "Not checked", f"{error}.")
            return JSONResponse(answer, status_code=503, media_type="application/problem+json")

    return router
