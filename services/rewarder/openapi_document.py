"""What the routes cannot say themselves: that HttpGuard, in front of all of them, asks for a key."""

from functools import partial
from typing import Any

from fastapi import FastAPI

from shared.http_guard import OPEN_PATHS

_SCHEME = "key"


def declare_key(app: FastAPI) -> None:
    """Have the OpenAPI document of ``app`` say that every route but the open ones needs a bearer key."""
    app.openapi = partial(_with_key, app.openapi)  # type: ignore[method-assign]


def _with_key(make: Any) -> dict[str, Any]:
    document: dict[str, Any] = make()
    document.setdefault("components", {})["securitySchemes"] = {_SCHEME: {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path in OPEN_PATHS else [{_SCHEME: []}]
    return document
