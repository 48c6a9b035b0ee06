"""Validates ids of Redis stream entries that clients send back."""

import re

_ID = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
_LARGEST = 2**64 - 1


def parse_stream_id(text: str) -> str | None:
    """Return the text if it is a valid id of a stream entry after which others can follow, else None."""
    match = _ID.fullmatch(text)
    if match is None or any(int(part) > _LARGEST for part in match.groups()):
        return None
    # Redis reports an error for a range that begins above the largest id, and no entry can be there.
    return None if all(int(part) == _LARGEST for part in match.groups()) else text
