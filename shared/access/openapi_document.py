"""Adds keys, scopes and error answers to a service's OpenAPI document, and removes its internal routes.

    FastAPI's document, RouteTable --complete--> document with names, scopes, common errors and their schemas

All services use it. The common errors come from the layers before the application (access/, serving/), which FastAPI
does not know. FastAPI's own error schemas are replaced, because no service answers with them.
"""

import json
import re
from http import HTTPStatus
from typing import Any, Final

from shared.access.route_table import INTERNAL, MEANINGS, ErrorForm, Route, RouteTable

PROBLEM_JSON: Final = "application/problem+json"
_SCHEME: Final = "key"
_OF_THE_FRAMEWORK: Final = ("HTTPValidationError", "ValidationError")
_REFERENCE: Final = re.compile(r'"#/components/schemas/([^"]+)"')
_EVERYWHERE: Final = (422, 500, 503)
_WITH_A_KEY: Final = (401, 403)
_WITH_A_BODY: Final = (400, 408, 413)

_PROBLEM: Final[dict[str, Any]] = {
    "title": "Problem",
    "description": "An error, after RFC 9457.",
    "type": "object",
    "required": ["type", "title", "status", "detail", "request_id"],
    "properties": {
        "type": {"type": "string", "description": "The kind of problem; it never changes", "pattern": "^/problems/"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What happened and what to do"},
        "request_id": {
            "type": "string",
            "description": "The request's id, as in the header X-Request-Id and in the log",
        },
        "missing_scope": {"type": "string", "description": "With 403: the scope that the key lacks"},
        "errors": {
            "type": "array",
            "description": "One entry for each problem",
            "items": {
                "type": "object",
                "required": ["field", "message"],
                "properties": {"field": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
}

_OPENAI_ERROR: Final[dict[str, Any]] = {
    "title": "OpenAiError",
    "description": "An error of a session's route, in OpenAI's form.",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string", "description": "What happened and what to do"},
                "type": {"type": "string"},
                "code": {"type": "string", "description": "The kind of error; it never changes"},
            },
        }
    },
}

_ANTHROPIC_ERROR: Final[dict[str, Any]] = {
    "title": "AnthropicError",
    "description": "An error of a session's route, in Anthropic's form.",
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message", "code"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string", "description": "What happened and what to do"},
                "code": {"type": "string", "description": "The kind of error; it never changes"},
            },
        },
    },
}
_ERRORS: Final[dict[ErrorForm, tuple[str, dict[str, Any]]]] = {
    "problem": (PROBLEM_JSON, _PROBLEM),
    "openai": ("application/json", _OPENAI_ERROR),
    "anthropic": ("application/json", _ANTHROPIC_ERROR),
}


def responses(descriptions: dict[int, str]) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's ``responses`` for a route's own errors. ``complete`` adds their schema, and common errors."""
    return {status: {"description": text} for status, text in descriptions.items()}


def complete(document: dict[str, Any], routes: RouteTable) -> dict[str, Any]:
    """Complete a service's OpenAPI document in place, and return it. Doing it twice changes nothing.

    Args:
        document: FastAPI's document; it is changed.
        routes: The service's routes.
    """
    components = document.setdefault("components", {})
    components["securitySchemes"] = {_SCHEME: _scheme()}
    schemas = components.setdefault("schemas", {})
    for name in _OF_THE_FRAMEWORK:
        schemas.pop(name, None)
    forms: set[ErrorForm] = {route.errors for route in routes.routes}
    for form in forms:
        schema = _ERRORS[form][1]
        schemas[schema["title"]] = schema
    for path in [*document["paths"]]:
        for method in [*document["paths"][path]]:
            route = routes.find(method.upper(), path).route
            if route is None or route.needs == INTERNAL:
                del document["paths"][path][method]
            else:
                _complete(document["paths"][path][method], route)
        if not document["paths"][path]:
            del document["paths"][path]
    _remove_unused(schemas, _referenced(document["paths"]))
    return document


def _remove_unused(schemas: dict[str, Any], used: set[str]) -> None:
    """Remove every schema, such as an internal route's, that neither is in ``used`` nor is referred to from there."""
    new = used
    while new:
        new = {name for known in new for name in _referenced(schemas.get(known))} - used
        used |= new
    for name in schemas.keys() - used:
        del schemas[name]


def _referenced(part: Any) -> set[str]:
    """Return the names of the schemas to which a part of a document refers."""
    return set(_REFERENCE.findall(json.dumps(part)))


def _scheme() -> dict[str, Any]:
    scopes = "; ".join(f"{scope}: {meaning}" for scope, meaning in MEANINGS.items())
    return {
        "type": "http",
        "scheme": "bearer",
        "description": f"An API key. A named key has scopes, and each operation says which it needs. {scopes}.",
    }


def _complete(operation: dict[str, Any], route: Route) -> None:
    operation["operationId"] = route.name
    operation["security"] = [] if route.needs is None else [{_SCHEME: [route.needs]}]
    answers = operation.setdefault("responses", {})
    statuses = {*_EVERYWHERE}
    if route.needs is not None:
        statuses |= {*_WITH_A_KEY}
    if "requestBody" in operation:
        statuses |= {*_WITH_A_BODY}
    if "{" in route.path:
        statuses.add(404)
    for status in statuses:
        answers.setdefault(str(status), {"description": HTTPStatus(status).phrase})
    for status, answer in answers.items():
        if status >= "400":
            content = answer.setdefault("content", {})
            if _is_of_the_framework(content.get("application/json", {})):
                del content["application/json"]
                answer["description"] = HTTPStatus(int(status)).phrase
            media_type, schema = _ERRORS[route.errors]
            content[media_type] = {"schema": {"$ref": f"#/components/schemas/{schema['title']}"}}
    operation["responses"] = {status: answers[status] for status in sorted(answers)}


def _is_of_the_framework(media: dict[str, Any]) -> bool:
    return str(media.get("schema", {}).get("$ref", "")).endswith(f"/{_OF_THE_FRAMEWORK[0]}")
