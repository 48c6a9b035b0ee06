"""Finds the known name that a user may have meant. Texts that are too long for a name are not compared."""

import difflib
from collections.abc import Iterable
from pathlib import Path

_LONGEST = 64
"""The time to compare grows with the product of the lengths: one name of a megabyte took 20 s."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in ``known`` that is most similar to ``name``; None if none is similar."""
    if len(name) > _LONGEST:
        return None
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def similar_directory(path: Path) -> Path | None:
    """Return the directory beside ``path`` with the most similar name; None if no name is similar."""
    try:
        beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        return None
    near = nearest(path.name, beside)
    return None if near is None else path.with_name(near)
