"""Bounds the processor time of a block, whatever else the machine and the test process do."""

import gc
import time
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def bounded_time(seconds: float) -> Generator[None]:
    """Assert that the block takes less than ``seconds`` of its own thread's processor time.

    What earlier tests left is frozen: one collection among it took a second, in whichever block it happened.
    """
    gc.freeze()
    try:
        began_at_s = time.thread_time()
        yield
        took_s = time.thread_time() - began_at_s
    finally:
        gc.unfreeze()
    assert took_s < seconds
