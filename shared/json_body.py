"""What a route takes for JSON: a body that is declared as JSON, and is JSON. Whatever the framework.

Content-Type --require_json--> body --decode_json--> value
                    415                  400
"""

from typing import Any

import msgspec


class BodyError(Exception):
    """The body cannot be taken; the arguments are those of ``shared.http_guard.problem``."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.title = title
        self.detail = detail


def require_json(content_type: str) -> None:
    """Raise BodyError 415 unless the header ``Content-Type`` says JSON."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise BodyError(415, "Not JSON", "Send JSON, with the header 'Content-Type: application/json'.")


def decode_json(body: bytes) -> Any:
    """Return what the body holds: without NaN, infinities or lone surrogates, which are no JSON.

    Raises:
        BodyError: 400.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # They name the byte, never the content.
        detail = f"The body is not JSON: {error}. (NaN and Infinity are not JSON either.)"
        raise BodyError(400, "Malformed JSON", detail) from error
    except RecursionError as error:
        raise BodyError(400, "Malformed JSON", "The body is nested too deeply.") from error
