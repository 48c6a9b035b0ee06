"""Limits the processor time of a block, for calls without a limit of their own, such as a regex search.

Processor time, not time on the clock: whether an answer is judged does not depend on how busy the machine is. The limit
uses SIGPROF, which Python's regular expressions check for while they search. It works only in the main thread of a
process, where a worker runs reward functions. If the signal has no effect, the worker's deadline still ends the call.
"""

import contextlib
import signal
from collections.abc import Generator
from types import FrameType

_AGAIN_AFTER_S = 0.1
"""An exception that is raised inside a weak reference's callback or a destructor is lost, so the signal is repeated."""


class TimeIsUpError(BaseException):
    """The time limit was reached. Not an Exception, so that library code in the block does not catch it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """Raise TimeIsUpError in the block after this many seconds of processor time."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        if is_inside:
            raise TimeIsUpError
        return

    is_inside = True
    handler_before = signal.signal(signal.SIGPROF, stop)
    timer_before = signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_AFTER_S)
    try:
        try:
            yield
        finally:
            is_inside = False
    finally:
        signal.setitimer(signal.ITIMER_PROF, *timer_before)
        signal.signal(signal.SIGPROF, handler_before)
