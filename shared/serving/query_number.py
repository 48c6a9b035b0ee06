"""Validates whole numbers in query parameters: digits, with or without a minus sign. All services use it.

Python's ``int`` also accepts surrounding spaces, underscores, and digits of other scripts. Two programs that read one
URL must not read two numbers.
"""

import re

from pydantic import BeforeValidator

_WHOLE = re.compile(r"-?[0-9]{1,19}", re.ASCII)


def _plain(text: object) -> object:
    if isinstance(text, str) and not _WHOLE.fullmatch(text):
        raise ValueError("must be a whole number in digits")
    return text


WHOLE = BeforeValidator(_plain)
"""Must be last in the annotation: constraints after it would be missing in the OpenAPI document."""
