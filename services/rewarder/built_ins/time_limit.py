"""Limits the time of a block with SIGALRM, for calls without a time limit of their own, such as a regex search.

Python's regular expressions check for signals while they search. SIGALRM works only in the main thread of a process,
where a worker runs reward functions. If the signal has no effect, the worker's deadline still ends the call.
"""

import contextlib
import signal
from collections.abc import Generator
from types import FrameType
from typing import NoReturn


class TimeIsUpError(BaseException):
    """The time limit was reached. Not an Exception, so that library code in the block does not catch it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """Raise TimeIsUpError in the block after this many seconds."""

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise TimeIsUpError

    handler_before = signal.signal(signal.SIGALRM, stop)
    timer_before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer_before)
        signal.signal(signal.SIGALRM, handler_before)
