"""What to write instead of a field that a body does not have."""

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel


def no_such_field(body: object, location: Sequence[int | str]) -> str:
    """Return the sentence for a field that is not there.

    Args:
        body: The annotation of the body.
        location: Of the field in it, as pydantic says it.
    """
    known = _fields(body, location[:-1])
    near = difflib.get_close_matches(str(location[-1])[:100], known, n=1) if location else []
    if near:
        return f"there is no such field; did you mean {near[0]}?"
    return f"there is no such field; there are {', '.join(known)}" if known else "there is no such field"


def _fields(annotation: object, path: Sequence[int | str]) -> list[str]:
    models = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    model = next((kind for kind in models if issubclass(kind, BaseModel)), None)
    if model is None:
        return []
    if not path:
        return list(model.model_fields)
    field: Any = model.model_fields.get(str(path[0]))
    return [] if field is None else _fields(field.annotation, path[1:])
