"""Makes error replies as problem+json (RFC 9457), for all routes of the rewarder."""

from typing import Any

from fastapi.responses import JSONResponse

from shared.access.openapi_document import PROBLEM_JSON
from shared.serving.http_guard import problem


def problem_reply(status: int, title: str, detail: str, **more: Any) -> JSONResponse:
    """Return an error reply as problem+json. ``more`` has further fields of its body."""
    return JSONResponse(problem(status, title, detail, **more), status_code=status, media_type=PROBLEM_JSON)
