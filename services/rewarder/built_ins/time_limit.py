"""Limits the processor time of a block, for calls without a limit of their own, such as a regex search.

The limit counts processor time of the calling thread and not time on the clock, so a busy machine does not change
which answers are judged. It uses SIGPROF, which Python's regular expressions check for while they search. It works only
in the main thread of a process, where a worker runs reward functions. If the signal has no effect, the worker's
deadline still ends the call.

The worker's deadline counts time on the clock for a whole call. When it passes, the verdicts on all completions of the
call are lost. To prevent this on a busy machine, the limits of later completions shrink once a call has taken long
(``Patience``), and no completion is tried shortly before the deadline.
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
    """Set the deadline of the reward call in the block, in seconds on the clock from now; None means no deadline.

    ``Patience`` reads it, and leaves the last tenth of the time for the answer.
    """
    token = _tries_until_s.set(math.inf if seconds is None else time.monotonic() + _ALMOST * seconds)
    try:
        yield
    finally:
        _tries_until_s.reset(token)


class Patience:
    """Computes time limits for the steps of one reward call, such as one regex search per completion.

    Args:
        seconds: Time on the clock after which the steps of the call have to be quick. Half of the time until the call's
            own deadline (``reward_timeout_s``, by default 30 s) applies instead if it is shorter.
    """

    def __init__(self, seconds: float = 15.0) -> None:
        self._tries_until_s = _tries_until_s.get()
        now = time.monotonic()
        self._ends_at_s = now + min(seconds, (self._tries_until_s - now) / 2)

    def limit(self, seconds: float) -> float:
        """Return the next step's limit in seconds of processor time: ``seconds``, or less if the call is late.

        It is at most half of the time until the call's deadline, and 0 if too little is left to try the step.
        """
        now = time.monotonic()
        limit_s = min(seconds, (self._tries_until_s - now) / 2)
        if now >= self._ends_at_s:
            limit_s = min(limit_s, _QUICK_S)
        return limit_s if limit_s >= _LEAST_S else 0.0


def out_of_time(what: str, limit_s: float) -> str:
    """Return the reason for a ``timeout``: the step reached its limit, or was not tried because its limit is 0."""
    if limit_s < _LEAST_S:
        return f"{what} was not tried: other completions of the call took the time until its deadline"
    return f"{what} took longer than {round(limit_s, 3):g} s of processor time"


@contextlib.contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """Raise TimeIsUpError in the block after ``seconds`` of its thread's processor time; at once if that is 0."""
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
