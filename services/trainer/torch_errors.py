"""Shortens the errors of torch.distributed to one sentence."""

import re

_SOURCE = re.compile(r"^\[[^\]]*\.cc:\d+\] ")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without C++ source location and advice; without text, its type."""
    sentence = (str(error).splitlines() or [type(error).__name__])[0]
    return _SOURCE.sub("", sentence).partition(" This is typically")[0]
