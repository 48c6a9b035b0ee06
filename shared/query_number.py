"""Whole numbers in query parameters: digits, perhaps behind a minus. The same in every service.

Python's ``int`` takes more: spaces around them, underscores, digits of other scripts. Two readers of one URL must not
read two numbers.
"""

import re

from pydantic import BeforeValidator

_WHOLE = re.compile(r"-?[0-9]{1,19}", re.ASCII)


def _plain(text: object) -> object:
    if isinstance(text, str) and not _WHOLE.fullmatch(text):
        raise ValueError("must be a whole number in digits")
    return text


WHOLE = BeforeValidator(_plain)
"""Stands last in the annotation: what follows it would be missing in the OpenAPI document."""
