"""Runs a service and measures its event loop: reports each slow callback with its thread's processor time.

    python loop_meter.py FILE MODULE ARGUMENTS...    one line in FILE per callback: milliseconds, and its name

It measures processor time, which does not depend on other processes on a busy machine.
"""

import asyncio.events
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

_WORTH_A_LINE_S = 0.005


def install(file: Path) -> None:
    """Measure all callbacks of the main thread's event loop."""
    handle: Any = asyncio.events.Handle
    run = handle._run
    main = threading.main_thread()
    lines = file.open("a", encoding="utf-8", buffering=1)  # once: a service may have no file descriptor left

    def measured(self: Any) -> None:
        began_at = time.thread_time()
        run(self)
        took_s = time.thread_time() - began_at
        if took_s >= _WORTH_A_LINE_S and threading.current_thread() is main:
            lines.write(f"{1000 * took_s:.1f} {self!r:.300}\n")

    handle._run = measured


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    module = sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
