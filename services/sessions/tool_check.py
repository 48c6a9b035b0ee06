"""The HTTP route that checks the tools of a run before it starts. The trainer calls it when a run is submitted.

POST /v1/tools/check   the run's options for agents --load, as for a run--> 200 with the schemas of the tools
                                                                            422 with the reasons why some are unusable
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError

from shared.access.openapi_document import responses
from shared.run_options.agents import AgentOptions
from shared.run_options.wording import what_is_wrong
from shared.serving.json_body import BodyError, decode_json, require_json

_MAX_NESTED = 1000
"""Most nested values of a body. It has a list of at most 128 names."""
_MAX_BYTES = 1024 * 1024
"""Longest body, as for the whole run at its submit. Checking a longer one would keep the event loop."""

Check = Callable[[AgentOptions], Awaitable[Sequence[dict[str, Any]]]]
"""Loads the tools and returns their schemas; raises UserError if some cannot be used."""


class CheckedTools(BaseModel):
    """The reply if all of a run's tools can be used: their schemas."""

    tools: list[dict[str, Any]] = Field(description="JSON schemas of the tools, as the model sees them")


def tool_check_router(check: Check) -> APIRouter:
    """Build the router of ``POST /v1/tools/check``; ``check`` loads the tools."""
    router = APIRouter()

    @router.post(
        "/v1/tools/check",
        summary="Import the tools of a run and describe them",
        responses=responses({415: "Not declared as JSON"}),
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": AgentOptions.document()}},
            }
        },
    )
    async def check_tools(request: Request) -> CheckedTools:
        require_json(request.headers.get("content-type", ""))
        body = await request.body()
        if len(body) > _MAX_BYTES:
            raise BodyError(413, "Body too large", f"A request to this route may have at most {_MAX_BYTES} bytes.")
        options = _options(decode_json(body, max_nested=_MAX_NESTED))
        return CheckedTools(tools=list(await check(options)))

    return router


def _options(raw: Any) -> AgentOptions:
    try:
        return AgentOptions.model_validate(raw)
    except ValidationError as error:
        items = error.errors(include_url=False)[:100]
        detail = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'the body'} {what_is_wrong([item])}"[:1000] for item in items
        )
        raise BodyError(422, "Invalid request", detail) from error
