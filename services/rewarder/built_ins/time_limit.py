"""Bounds what cannot be bounded otherwise, such as a regular expression that backtracks, by SIGALRM.

Python's regular expressions look for signals while they search. Works in the main thread of a process only, which is
where a worker runs reward functions. The worker's own deadline stands behind it and asks nobody.
"""

import contextlib
import signal
from collections.abc import Generator
from types import FrameType
from typing import NoReturn


class TimeIsUpError(BaseException):
    """Not an Exception, so that nothing in between takes it for an error of its own."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """Raise TimeIsUpError in the block after so many seconds."""

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise TimeIsUpError

    handler_before = signal.signal(signal.SIGALRM, stop)
    timer_before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer_before)
        signal.signal(signal.SIGALRM, handler_before)
