"""Runs first in every process that vLLM spawns: the process ends with its parent, and its failures are recorded.

    python -m services.generator      watch_children()
     +-- EngineCore                   imports this module as __mp_main__: end_with_parent(), tell_failures()
          +-- Worker                  does the same; exists if there are several workers (engine_config.py)

On a CPU, engine cores are forked from a fork server in between (fork_server.py), and end with it.

Without this, vLLM's engine core outlives a parent that was killed with SIGKILL, and keeps the GPU and gigabytes of
memory. A vLLM plugin could not do this: an orphaned engine core loads plugins only after it has waited minutes for its
parent.
"""

import importlib.util
import os
import signal
import sys
import threading
import time

from services.generator.engine import engine_failure
from services.generator.engine.vllm_environment import PARENT
from shared.service.forked import let_go_of_fork_server

_EVERY_S = 0.5


def watch_children() -> None:
    """Make every process that this one spawns from now on import this module.

    A spawned process imports its parent's main module, but not if that is a package's ``__main__``. So this function
    sets this module as the main one.
    """
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("services.generator.engine.spawned")
    os.environ[PARENT] = str(os.getpid())


def end_with_parent() -> None:
    """Start a thread that kills this process as soon as the process that spawned it has ended."""
    parent = int(os.environ.get(PARENT, os.getppid()))
    os.environ[PARENT] = str(os.getpid())  # for the processes that this one spawns

    def watch() -> None:
        # multiprocessing's own handle of the parent exists only after vLLM is imported, many seconds from now.
        while os.getppid() == parent:
            time.sleep(_EVERY_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def tell_failures() -> None:
    """Have vLLM's first fatal failure in this process written to a file, which the generator's main process reads."""
    engine_failure.write_down_failures()


if __name__ == "__mp_main__":
    let_go_of_fork_server()
    end_with_parent()
    tell_failures()
