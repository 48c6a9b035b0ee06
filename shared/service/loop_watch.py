"""Ends a process whose event loop has stopped: it answers no request any more, and only a restart helps.

    event loop --beats once a second--> count <--looks once a second-- thread
                                          the same at 45 looks: the stacks of all threads to stderr, exit status 1

The thread counts its looks and not the time, so a suspended process is not taken for a hung one. The thread cannot look
while C code holds the interpreter's lock. For this case, each beat also sets a timer that does not need the lock. The
timer is ten times as long, because it also runs while the process is suspended.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Generator
from typing import Final

HUNG_AFTER_S: Final = 45
"""Below the minute after which `headrace up` and Kubernetes kill a service that does not answer, without its stacks."""
_LOCKED = 10
"""How many times longer the timer without a lock runs."""
_EVERY_S = 1.0
_SAYING_S = 10
_STDERR, _CRASHED = 2, 1


@contextlib.contextmanager
def ended_if_hung(name: str, *, after_s: int = HUNG_AFTER_S) -> Generator[None]:
    """End this process if the running event loop makes no progress for ``after_s`` seconds in this block.

    Args:
        name: Name of the service, for the message.
        after_s: How long the loop may stand still, in seconds.
    """
    done = threading.Event()
    num_beats = 0

    def beat() -> None:
        nonlocal num_beats
        num_beats += 1
        faulthandler.dump_traceback_later(_LOCKED * after_s, exit=True, file=_STDERR)

    async def keep_beating() -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            beat()

    def watch() -> None:
        seen, num_misses = -1, 0
        while not done.wait(_EVERY_S):
            num_misses = num_misses + 1 if num_beats == seen else 0
            seen = num_beats
            if num_misses >= after_s:
                _end(name, after_s)

    beat()
    beating = asyncio.create_task(keep_beating(), name="beats of the loop")
    threading.Thread(target=watch, name="loop watch", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        beating.cancel()
        faulthandler.cancel_dump_traceback_later()


def _end(name: str, after_s: int) -> None:
    """Write the stacks of all threads to stderr, and exit with status 1.

    The logging module is not used, because another thread may hold its lock. Writing to stderr may fail or block.
    """
    signal.alarm(_SAYING_S)  # ends the process even in a write that never returns
    says = f"{name} ends, restart it: its event loop stood still for {after_s} s. The stacks of all threads:\n"
    with contextlib.suppress(OSError):
        os.write(_STDERR, says.encode())
    faulthandler.dump_traceback(_STDERR, all_threads=True)
    os._exit(_CRASHED)
