"""Ends a process without waiting for its threads, which may never end."""

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

_CRASHED = 1


def exit_at_once(code: int) -> NoReturn:
    """Exit without waiting for any thread, after what was printed has been written out. Skips atexit functions."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run a process's main function and exit with its code; at once if a thread would keep the process from ending.

    After an unexpected exception, the traceback is printed and the code is 1.
    """
    try:
        code = main()
    except Exception:  # noqa: BLE001  printed
        traceback.print_exc()
        code = _CRASHED
    if has_other_threads():
        exit_at_once(code)
    sys.exit(code)


def has_other_threads() -> bool:
    """Whether the process would wait at exit for a thread, such as a thread of a user's module."""
    others = set(threading.enumerate()) - {threading.main_thread()}
    return any(not thread.daemon for thread in others)
