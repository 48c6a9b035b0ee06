"""Ends a process whose event loop has stopped. It answers no request any more, and only a restart helps.

    event loop --beats once a second--> count <--looks once a second-- thread
                                          the same at 120 looks: the stacks of all threads to stderr, exit status 1

The thread counts its looks and not the time: a process that was suspended has not looked either.
"""

import asyncio
import contextlib
import faulthandler
import os
import threading
from collections.abc import Generator
from typing import Final

HUNG_AFTER_S: Final = 120
_EVERY_S = 1.0
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

    async def beat() -> None:
        nonlocal num_beats
        while True:
            num_beats += 1
            await asyncio.sleep(_EVERY_S)

    def watch() -> None:
        seen, num_misses = -1, 0
        while not done.wait(_EVERY_S):
            num_misses = num_misses + 1 if num_beats == seen else 0
            seen = num_beats
            if num_misses >= after_s:
                _end(name, after_s)

    beating = asyncio.create_task(beat(), name="beats of the loop")
    threading.Thread(target=watch, name="loop watch", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        beating.cancel()


def _end(name: str, after_s: int) -> None:
    """Exit without the logging module: another thread may hold its lock."""
    says = f"{name} ends, restart it: its event loop has not run for {after_s} s. The stacks of all threads:\n"
    os.write(_STDERR, says.encode())
    faulthandler.dump_traceback(_STDERR, all_threads=True)
    os._exit(_CRASHED)
