"""Ids of Redis stream entries, as clients send them back."""

import re

_ID = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
_LARGEST = 2**64 - 1


def parse_stream_id(text: str) -> str | None:
    """Return the id, or None if Redis would refuse it."""
    match = _ID.fullmatch(text)
    if match is None or any(int(part) > _LARGEST for part in match.groups()):
        return None
    # "above the largest id" is an error in Redis, and nothing is above it.
    return None if all(int(part) == _LARGEST for part in match.groups()) else text
