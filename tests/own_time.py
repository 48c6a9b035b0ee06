"""Bounds the processor time of a block, whatever else the machine and the test process do."""

import gc
import time
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def bounded_time(seconds: float) -> Generator[None]:
    """Assert that the block takes less than ``seconds`` of its own thread's processor time.

    What earlier tests left is frozen, and stays so: a collection among it took seconds, in whichever block it happened.
    """
    gc.freeze()
    began_at_s = time.thread_time()
    yield
    took_s = time.thread_time() - began_at_s
    assert took_s < seconds
