"""Detects processes that have been stopped (SIGSTOP, SIGTSTP) for a minute: they neither work nor end.

A supervisor looks at its processes at intervals. The looks are counted, not the time between them: if the supervisor
was stopped too for a minute, as on a laptop that slept, no process has been stopped for long.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

STOPPED_S: Final = 60.0
"""A person may stop a process for this long to look at it."""


class Stops:
    """Counts how long at least one of several processes has been stopped.

    Args:
        every_s: Seconds between two looks.
    """

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._stopped_s = 0.0

    def look(self, pids: Iterable[int]) -> bool:
        """Return whether, for more than STOPPED_S, each look found one of these processes or their children stopped.

        Call it every ``every_s`` seconds.
        """
        is_one = any(_is_stopped(each) for pid in pids for each in (pid, *_children(pid)))
        self._stopped_s = self._stopped_s + self._every_s if is_one else 0.0
        return self._stopped_s > STOPPED_S


def _is_stopped(pid: int) -> bool:
    # Format: (name) state ... The name may contain anything. State "t" is a debugger's stop.
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] == ["T"]


def _children(pid: int) -> Iterable[int]:
    return map(int, _read(f"/proc/{pid}/task/{pid}/children").split())


def _read(path: str) -> str:
    """Return the content of a file in /proc, or "" if the process has ended or /proc does not exist."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
