"""Cleans up in processes that multiprocessing's fork server has forked."""

import contextlib
import os
from multiprocessing import forkserver


def let_go_of_fork_server() -> None:
    """Close this process's copy of the pipe by which the fork server notices that its service is gone.

    Every child inherits a copy. In a hung child, it would keep the fork server alive after the service was killed.
    """
    state = getattr(forkserver, "_forkserver")  # noqa: B009  private: getattr hides it from type checkers
    if state._forkserver_alive_fd is not None:  # noqa: SLF001
        with contextlib.suppress(OSError):
            os.close(state._forkserver_alive_fd)  # noqa: SLF001
        state._forkserver_alive_fd = state._forkserver_address = None  # noqa: SLF001
