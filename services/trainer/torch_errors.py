"""Makes a sentence of what torch's distributed parts raise."""

import re

_SOURCE = re.compile(r"^\[[^\]]*\.cc:\d+\] ")


def first_line(error: BaseException) -> str:
    """Return the sentence of an error that brings a C++ file, a stack and advice along; its type if it says nothing."""
    sentence = (str(error).splitlines() or [type(error).__name__])[0]
    return _SOURCE.sub("", sentence).partition(" This is typically")[0]
