"""Rewrites the error answers of session routes into the form of the route's protocol: OpenAI's or Anthropic's.

    OpenAI:     {"error": {"type": "invalid_request_error", "code": "session_over", "message": "...", "param": null}}
    Anthropic:  {"type": "error", "error": {"type": "invalid_request_error", "code": "session_over", "message": "..."}}

Other paths below a session have OpenAI's form.
"""

from typing import Any

from services.sessions.open_sessions import SESSIONS_PATH
from shared.access.problem_forms import Form, RewrittenProblems, error_code, error_type, openai_error
from shared.access.route_table import SESSIONS
from shared.serving.http_guard import App, Scope

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def with_client_errors(app: App) -> App:
    """Wrap the guarded application, so that errors of each session route have the form of the route's protocol."""
    return RewrittenProblems(app, _form_of, media_type="application/json")


def anthropic_error(problem: dict[str, Any]) -> dict[str, Any]:
    """Convert a problem+json body to Anthropic's form, with the problem's type as ``code``, an additional field."""
    kind = error_type(problem, _ANTHROPIC_TYPES, "api_error")
    return {"type": "error", "error": {"type": kind, "code": error_code(problem), "message": problem["detail"]}}


_FORMS: dict[str, Form] = {"openai": openai_error, "anthropic": anthropic_error}


def _form_of(scope: Scope) -> Form | None:
    """Return the function that rewrites a request's errors; None to leave them as problem+json."""
    path = str(scope["path"])
    route = SESSIONS.find(str(scope["method"]), path).route
    if route is None:
        return openai_error if path.startswith(f"{SESSIONS_PATH}/") else None
    return _FORMS.get(route.errors)
