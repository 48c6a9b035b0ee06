"""Turns every error of the run API into an HTTP answer with an RFC 9457 problem+json body.

    Problem, BodyError, HTTPException    their own status
    UserError, RequestValidationError    422: the client can fix it
    UnavailableError, StateLostError     503: a peer is away, or Redis is full or was wiped; a retry may help
    anything else                        500: logged here; the client learns only that it happened

If single fields are invalid, ``errors`` lists them. The client's input is not echoed, except for the names of settings
and the values that a message is about.
"""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from shared.access.openapi_document import PROBLEM_JSON, responses
from shared.errors import NoRoomError, StateLostError, UnavailableError, UserError
from shared.run_options.wording import what_is_wrong
from shared.serving.http_guard import problem
from shared.serving.json_body import BodyError

log = logging.getLogger(__name__)

_MAX_SENTENCE = 1000
_MAX_ERRORS = 100


class Problem(Exception):  # noqa: N818  the RFC's own word
    """An exception that becomes an HTTP error answer.

    Args:
        status: HTTP status.
        title: Short, and always the same for one kind of problem. The body's ``type`` is derived from it.
        detail: Sentences that say what happened and what to do.
        errors: (field, message) for each error.
        headers: Headers of the answer.
        more: Further members of the body.
    """

    def __init__(
        self,
        status: int,
        title: str,
        detail: str,
        *,
        errors: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = headers
        self.body = problem(status, title, detail, **more)
        if errors:
            self.body["errors"] = [{"field": field, "message": message} for field, message in errors]


def invalid_run(errors: Sequence[tuple[str, str]], **more: Any) -> Problem:
    """Return the 422 problem of an invalid run config, with one entry per error, at most 100."""
    errors = [(field[:100], message[:_MAX_SENTENCE]) for field, message in errors[:_MAX_ERRORS]]
    detail = "; ".join(f"{field}: {message}" if field else message for field, message in errors)
    return Problem(422, "Invalid run", detail, errors=errors, **more)


def no_such_run(run_id: str) -> Problem:
    """Return the 404 problem of a run that does not exist."""
    detail = "No run has this id or name, or an id that begins with it. GET /v1/runs lists them."
    return Problem(404, "No such run", detail, run_id=run_id)


def add_problem_handlers(app: FastAPI) -> None:
    """Make the app answer every error with a problem+json body."""
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(UserError, _on_user_error)
    app.add_exception_handler(BodyError, _on_body_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(UnavailableError, _on_unavailable)
    app.add_exception_handler(StateLostError, _on_unavailable)
    app.add_exception_handler(Exception, _on_unknown)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses`` argument of a FastAPI route: an OpenAPI entry for each of these error statuses."""
    return responses({status: HTTPStatus(status).phrase for status in statuses})


def _answer(body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(body, status_code=body["status"], media_type=PROBLEM_JSON, headers=headers)


def _on_problem(_request: Request, error: Exception) -> JSONResponse:
    found = cast("Problem", error)
    return _answer(found.body, found.headers)


def _on_user_error(_request: Request, error: Exception) -> JSONResponse:
    return _answer(problem(422, "Invalid request", str(error)))


def _on_body_error(_request: Request, error: Exception) -> JSONResponse:
    found = cast("BodyError", error)
    return _answer(problem(found.status, found.title, found.detail))


def _on_invalid_request(_request: Request, error: Exception) -> JSONResponse:
    errors: list[dict[str, str]] = []
    for item in cast("RequestValidationError", error).errors():
        # The input is left out: it may be large, secret, or not even valid Unicode.
        field = ".".join(str(part) for part in item["loc"][1:])[:100]
        errors.append({"field": field, "message": what_is_wrong([item])})
    detail = "; ".join(f"{item['field']}: {item['message']}" for item in errors)
    return _answer(problem(422, "Invalid request", detail, errors=errors))


def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    found = cast("HTTPException", error)
    details = {
        404: "There is nothing at this path. GET /openapi.json lists all routes.",
        405: f"This path does not take {request.method}. GET /openapi.json lists all routes.",
    }
    title = HTTPStatus(found.status_code).phrase
    detail = details.get(found.status_code, str(found.detail))
    return _answer(problem(found.status_code, title, detail), found.headers)


def _on_disconnect(_request: Request, _error: Exception) -> JSONResponse:
    """Return an answer that no client will read. Without one, the log would show a failure of the service."""
    return _answer(problem(400, "Incomplete body", "The connection was closed before the body was complete."))


def _on_unavailable(_request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, NoRoomError):  # a short wait would not help
        return _answer(problem(503, "Unavailable", str(error)), {"Retry-After": "60"})
    return _answer(problem(503, "Unavailable", f"{error}. Try again in a moment."), {"Retry-After": "5"})


def _on_unknown(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    detail = "See the trainer's log. The runs themselves are not affected."
    return _answer(problem(500, "Internal error", detail))
