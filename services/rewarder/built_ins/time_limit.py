"""Limits the processor time of a block, for calls without a limit of their own, such as a regex search.

Processor time of the calling thread, not time on the clock: whether an answer is judged does not depend on how busy the
machine is. The limit uses SIGPROF, which Python's regular expressions check for while they search. It works only in the
main thread of a process, where a worker runs reward functions. If the signal has no effect, the worker's deadline still
ends the call.

That deadline is on the clock, and holds for a whole call: a call with many slow completions on a busy machine would
lose the judgements of the others too. So a call's limits shrink once it has taken long on the clock (Patience).
"""

import contextlib
import signal
import time
from collections.abc import Generator
from types import FrameType

_QUICK_S = 0.05
"""Ten times what a plain answer takes."""
_ALMOST = 0.9
"""The timer's clock and the thread's differ by a few milliseconds."""
_AGAIN_AFTER_S = 0.1
"""An exception that is raised inside a weak reference's callback or a destructor is lost, so the signal is repeated."""


class TimeIsUpError(BaseException):
    """The time limit was reached. Not an Exception, so that library code in the block does not catch it."""


class Patience:
    """The limits of the steps of one call.

    Args:
        seconds: Time on the clock after which the steps of the call have to be quick. A call's own deadline
            (``reward_timeout_s``) is 30 s by default.
    """

    def __init__(self, seconds: float = 15.0) -> None:
        self._ends_at_s = time.monotonic() + seconds

    def limit(self, seconds: float) -> float:
        """Return the limit for a step that may normally take so many seconds of processor time."""
        return seconds if time.monotonic() < self._ends_at_s else min(seconds, _QUICK_S)


@contextlib.contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """Raise TimeIsUpError in the block after this many seconds of processor time."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        # The timer counts all threads of the process, which may have some that a reward function has left behind.
        if is_inside and time.thread_time() - began_at_s >= _ALMOST * seconds:
            raise TimeIsUpError

    is_inside = True
    began_at_s = time.thread_time()
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
