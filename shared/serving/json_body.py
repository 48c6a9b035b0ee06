"""Checks that a request's body is declared as JSON and is JSON. Does not depend on the web framework.

Content-Type --require_json--> body --decode_json--> value
                    415                  400, 422
"""

from typing import Any, Final

import msgspec

MAX_NESTED: Final = 100_000
"""Most arrays, objects and object keys in one body. Numbers and text are cheap; 8 MiB of "[]," take 0.8 s to decode."""
_MAX_VALUES = 2_000_000
_MAX_TEXTS = 500_000
"""Most strings in a body that may be over a limit: its strings must be removed, one by one, to count the rest."""


class BodyError(Exception):
    """A request's body is not accepted. It has the status, title and detail of the problem+json answer."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.title = title
        self.detail = detail


def require_json(content_type: str) -> None:
    """Raise BodyError 415 unless the header ``Content-Type`` is application/json."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise BodyError(415, "Not JSON", "Send JSON, with the header 'Content-Type: application/json'.")


def decode_json(body: bytes, *, max_nested: int = MAX_NESTED) -> Any:
    """Decode a JSON body. NaN, infinities and lone surrogates are refused, because they are not JSON.

    Raises:
        BodyError: 400 if it is malformed; 422 as in ``refuse_nested``.
    """
    refuse_nested(body, max_nested=max_nested)
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # The exceptions name the position, never the content.
        detail = f"The body is not JSON: {error}. (NaN and Infinity are not JSON either.)"
        raise BodyError(400, "Malformed JSON", detail) from error
    except RecursionError as error:
        raise BodyError(400, "Malformed JSON", "The body is nested too deeply.") from error


def refuse_nested(body: bytes, *, max_nested: int = MAX_NESTED) -> None:
    """Raise BodyError 422 if a body has more arrays, objects and keys than ``max_nested``, or too many values."""
    if not _has_more_than(body, max_nested):
        return
    detail = f"The body has more than {max_nested} arrays, objects and object keys, or {_MAX_VALUES} values."
    raise BodyError(422, "Invalid request", detail)


def _has_more_than(body: bytes, most: int) -> bool:
    """Whether a body has too many values, or more arrays, objects and object keys than ``most``, outside strings."""
    if _count(body) <= most and body.count(b",") <= _MAX_VALUES:
        return False
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 2 * _MAX_TEXTS:
        return True
    outside = b"".join(bare.split(b'"')[::2])
    return _count(outside) > most or outside.count(b",") > _MAX_VALUES


def _count(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{") + body.count(b":")
