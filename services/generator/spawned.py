"""Runs first of all in every process that vLLM spawns: none outlives its parent, and what fails there is known here.

    python -m services.generator      watch_children()
     +-- EngineCore (spawned)         imports this module as __mp_main__: end_with_parent(), tell_failures()
          +-- Worker (spawned)        the same; where there are several (lone_worker.py)

By itself vLLM's engine core outlives a parent that was killed with SIGKILL, and keeps the GPU and gigabytes of memory.
Its plugins are no place for this: it loads them only after minutes of waiting for a parent that is gone.
"""

import importlib.util
import os
import signal
import sys
import threading
import time

from services.generator import engine_failure

_EVERY_S = 0.5
_PARENT = "HEADRACE_PARENT_PID"
"""Who spawns, for the spawned: one that asks the kernel may do so after its parent is gone."""


def watch_children() -> None:
    """Have every process that this one spawns from now on import this module.

    A spawned process imports its parent's main module, but not if that is a package's ``__main__``: so name this one.
    """
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("services.generator.spawned")
    os.environ[_PARENT] = str(os.getpid())


def end_with_parent() -> None:
    """Kill this process as soon as the process that spawned it is gone."""
    parent = int(os.environ.get(_PARENT, os.getppid()))
    os.environ[_PARENT] = str(os.getpid())  # for those that this process spawns

    def watch() -> None:
        # multiprocessing's own handle on the parent exists only once vLLM is imported, many seconds from now.
        while os.getppid() == parent:
            time.sleep(_EVERY_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def tell_failures() -> None:
    """Have the first failure of this process written down for the one that serves (engine_failure.py)."""
    engine_failure.write_down_failures()


if __name__ == "__mp_main__":
    end_with_parent()
    tell_failures()
