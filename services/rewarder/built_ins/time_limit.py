"""Limits the processor time of a block, for calls without a limit of their own, such as a regex search.

Processor time of the calling thread, not time on the clock: whether an answer is judged does not depend on how busy the
machine is. The limit uses SIGPROF, which Python's regular expressions check for while they search. It works only in the
main thread of a process, where a worker runs reward functions. If the signal has no effect, the worker's deadline still
ends the call.

That deadline is on the clock, and holds for a whole call: a call with many slow completions on a busy machine would
lose the judgements of the others too. So a call's limits shrink once it has taken long on the clock (Patience), and
nothing is tried any more shortly before its deadline.
"""

import contextlib
import math
import signal
import time
from collections.abc import Generator
from contextvars import ContextVar
from types import FrameType

_QUICK_S = 0.05
"""Ten times what a plain answer takes."""
_LEAST_S = 0.001
"""A step with less time than this is not tried."""
_ALMOST = 0.9
"""The timer's clock and the thread's differ by a few milliseconds."""
_AGAIN_AFTER_S = 0.1
"""An exception that is raised inside a weak reference's callback or a destructor is lost, so the signal is repeated."""


class TimeIsUpError(BaseException):
    """The time limit was reached. Not an Exception, so that library code in the block does not catch it."""


_tries_until_s: ContextVar[float] = ContextVar("when the call of this function tries no more steps", default=math.inf)


@contextlib.contextmanager
def call_deadline(seconds: float | None) -> Generator[None]:
    """Make the steps in the block end in time for a call that is lost after this many seconds on the clock.

    A tenth of them is left for the answer. Without ``seconds`` there is no deadline.
    """
    token = _tries_until_s.set(math.inf if seconds is None else time.monotonic() + _ALMOST * seconds)
    try:
        yield
    finally:
        _tries_until_s.reset(token)


class Patience:
    """The limits of the steps of one call.

    Args:
        seconds: Time on the clock after which the steps of the call have to be quick. It is at most half of the time
            until the call's own deadline (``reward_timeout_s``), which is 30 s by default.
    """

    def __init__(self, seconds: float = 15.0) -> None:
        self._tries_until_s = _tries_until_s.get()
        now = time.monotonic()
        self._ends_at_s = now + min(seconds, (self._tries_until_s - now) / 2)

    def limit(self, seconds: float) -> float:
        """Return the limit for a step that may normally take so many seconds of processor time.

        It is at most half of the time that is left, and 0 if nothing is to be tried any more.
        """
        now = time.monotonic()
        limit_s = min(seconds, (self._tries_until_s - now) / 2)
        if now >= self._ends_at_s:
            limit_s = min(limit_s, _QUICK_S)
        return limit_s if limit_s >= _LEAST_S else 0.0


def out_of_time(what: str, limit_s: float) -> str:
    """Return the detail of a step that has reached its limit, or was not tried because the limit is 0."""
    if limit_s < _LEAST_S:
        return f"{what} was not tried: other completions of the call took the time until its deadline"
    return f"{what} took longer than {round(limit_s, 3):g} s of processor time"


@contextlib.contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """Raise TimeIsUpError in the block after this many seconds of processor time; before the block if it is 0."""
    if seconds < _LEAST_S:
        raise TimeIsUpError

    def stop(_number: int, _frame: FrameType | None) -> None:
        # The timer counts all threads of the process, which may have some that a reward function has left behind.
        if not is_inside:
            return
        left_s = _ALMOST * seconds - (time.thread_time() - began_at_s)
        if left_s <= 0:
            raise TimeIsUpError
        signal.setitimer(signal.ITIMER_PROF, max(left_s, _LEAST_S), _AGAIN_AFTER_S)

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
