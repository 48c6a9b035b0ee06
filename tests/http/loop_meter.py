"""Runs a service with a meter on its event loop: each callback that takes long, by the processor time of its thread.

    python loop_meter.py FILE MODULE ARGUMENTS...    a line of FILE per callback: milliseconds, and what it was

Processor time is counted, which other processes on a busy machine do not take.
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

    def measured(self: Any) -> None:
        began_at = time.thread_time()
        run(self)
        took_s = time.thread_time() - began_at
        if took_s >= _WORTH_A_LINE_S and threading.current_thread() is main:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(f"{1000 * took_s:.1f} {self!r:.300}\n")

    handle._run = measured


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    module = sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
