"""Encodes and decodes the page cursors of list routes: opaque text that names the last item of a page.

    GET /v1/runs?limit=2              --> {"runs": [...], "next_cursor": "WzE3..."}
    GET /v1/runs?limit=2&cursor=WzE3  --> {"runs": [...], "next_cursor": null}       the last page

All services use it. A cursor names the last item that was looked at, not a count, so items that are added or removed
between two pages shift nothing.
"""

import base64
import binascii
from typing import Final, TypeVar

import msgspec

from shared.serving.json_body import BodyError

MAX_CURSOR: Final = 200
"""Largest allowed length of a cursor, in characters."""
MEANING: Final = "next_cursor of the previous page"
NEXT_MEANING: Final = "Send it back as cursor for the next page; null on the last page"
_PositionT = TypeVar("_PositionT")


def encode_cursor(position: object) -> str:
    """Return the cursor of a position: numbers, text, or a tuple of them."""
    return base64.urlsafe_b64encode(msgspec.json.encode(position)).decode().rstrip("=")


def decode_cursor(cursor: str, position: type[_PositionT]) -> _PositionT:
    """Return the position in a cursor, as a value of the type ``position``.

    Raises:
        BodyError: 400 if the text is not a cursor, or not one with such a position.
    """
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        return msgspec.json.decode(base64.b64decode(padded, altchars=b"-_", validate=True), type=position)
    except (msgspec.DecodeError, UnicodeError, binascii.Error, RecursionError) as error:
        raise bad_cursor() from error


def bad_cursor() -> BodyError:
    """Return the error for a cursor that no page of the list had."""
    return BodyError(400, "Bad cursor", "cursor must be the next_cursor of an earlier page of the same list.")
