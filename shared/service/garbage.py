"""Keeps Python's garbage collector away from objects that stay.

A service makes most of its objects once: by imports (those of torch and transformers make half a million, vLLM's a
million), and at its start. A collection that examines them all takes up to 0.3 s, and finds nothing.
"""

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def collected_later() -> Generator[None]:
    """Collect no garbage meanwhile. Imports of torch and of vLLM then take a sixth less processor time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_long_lived_objects() -> None:
    """Have the garbage collector look only at objects that are created from now on."""
    gc.unfreeze()  # what was frozen by an earlier call may be garbage now
    gc.collect()
    gc.freeze()
