"""Shortens the errors of torch.distributed to one sentence."""

import re

_SOURCE = re.compile(r"^\[[^\]]*\.cc:\d+\] ")


def first_line(error: BaseException) -> str:
    """Return an error's first line without its C++ source location and advice; its type if it has no text."""
    sentence = (str(error).splitlines() or [type(error).__name__])[0]
    return _SOURCE.sub("", sentence).partition(" This is typically")[0]
