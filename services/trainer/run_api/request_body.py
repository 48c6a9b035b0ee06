"""Reads the JSON body of a request into a pydantic model, with one sentence for each mistake."""

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from services.trainer.problems import Problem
from shared.run_options.wording import what_is_wrong
from shared.serving.json_body import decode_json, require_json

_MAX_ERRORS = 10

_ModelT = TypeVar("_ModelT", bound=BaseModel)


async def read_body(request: Request, kind: type[_ModelT], *, max_nested: int) -> _ModelT:
    """Return the body of a request.

    Args:
        request: The request.
        kind: The model.
        max_nested: Most nested values of the body.

    Raises:
        BodyError: It is not declared as JSON, or is none.
        Problem: 422 with the mistakes.
    """
    require_json(request.headers.get("content-type", ""))
    try:
        return kind.model_validate(decode_json(await request.body(), max_nested=max_nested))
    except ValidationError as error:
        found = error.errors(include_url=False)[:_MAX_ERRORS]
        errors = [(".".join(map(str, item["loc"]))[:100], what_is_wrong([item])) for item in found]
        detail = "; ".join(f"{field}: {message}" if field else message for field, message in errors)
        raise Problem(422, "Invalid request", detail, errors=errors) from error
