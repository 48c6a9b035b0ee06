"""Says in the OpenAPI document what the door in front of the routes asks for: a key, and with which scope."""

from functools import partial
from typing import Any

from fastapi import FastAPI

from shared.access.route_table import REWARDER

_SCHEME = "key"


def declare_key(app: FastAPI) -> None:
    """Have the OpenAPI document of ``app`` say which scope the key of each route needs."""
    app.openapi = partial(_with_key, app.openapi)  # type: ignore[method-assign]


def _with_key(make: Any) -> dict[str, Any]:
    document: dict[str, Any] = make()
    document.setdefault("components", {})["securitySchemes"] = {_SCHEME: {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            route = REWARDER.find(method.upper(), path).route
            needs = route.needs if route is not None else None
            operation["security"] = [{_SCHEME: [needs]}] if needs is not None else []
    return document
