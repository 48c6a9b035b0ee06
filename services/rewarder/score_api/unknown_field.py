"""Makes the error message for an unknown field of a body, with the nearest known name."""

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel

from shared.near_name import nearest


def no_such_field(body: object, location: Sequence[int | str]) -> str:
    """Return the error message for an unknown field.

    Args:
        body: The annotation of the body.
        location: The field's location in the body, as reported by pydantic.
    """
    known = _fields(body, location[:-1])
    near = nearest(str(location[-1]), known) if location else None
    if near:
        return f"unknown field; did you mean {near}?"
    return f"unknown field; the known fields are {', '.join(known)}" if known else "unknown field"


def _fields(annotation: object, path: Sequence[int | str]) -> list[str]:
    models = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    model = next((kind for kind in models if issubclass(kind, BaseModel)), None)
    if model is None:
        return []
    if not path:
        return list(model.model_fields)
    field: Any = model.model_fields.get(str(path[0]))
    return [] if field is None else _fields(field.annotation, path[1:])
