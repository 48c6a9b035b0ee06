"""The base class of the rewarder's JSON bodies: strict types, no unknown keys, and a check for deep nesting."""

from collections.abc import Iterable
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

MAX_DEPTH = 32


class Body(BaseModel):
    """The base class of all JSON bodies of the rewarder: strict types, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def refuse_deep_nesting(found: dict[str, Any]) -> None:
    """Raise ValueError if lists and objects are nested more than ``MAX_DEPTH`` levels deep in ``found``."""
    level: list[object] = [found]
    for _ in range(MAX_DEPTH + 1):
        level = [item for node in level for item in _parts(node) if isinstance(item, dict | list)]
    if level:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _parts(node: object) -> Iterable[object]:
    return cast("dict[str, object]", node).values() if isinstance(node, dict) else cast("list[object]", node)
