"""Answers with a problem (RFC 9457), as every route of the rewarder does when it has no other answer."""

from typing import Any

from fastapi.responses import JSONResponse

from shared.access.openapi_document import PROBLEM_JSON
from shared.http_guard import problem


def problem_reply(status: int, title: str, detail: str, **more: Any) -> JSONResponse:
    """Return the reply; ``more`` are further fields of its body."""
    return JSONResponse(problem(status, title, detail, **more), status_code=status, media_type=PROBLEM_JSON)
