"""The known name that somebody may have meant. Looked for only where what was written can be a name."""

import difflib
from collections.abc import Iterable

_LONGEST = 64
"""Comparing takes the product of the lengths: one name of a megabyte took 20 s."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name of ``known`` that is most like ``name``; None if none is like it."""
    if len(name) > _LONGEST:
        return None
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)
