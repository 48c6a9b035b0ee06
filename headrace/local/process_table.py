"""Finds living processes and their descendants in /proc, and ends them.

launcher (child subreaper) -- service -- worker
                                 dies --^ its worker becomes the launcher's child, so it can still be found
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from headrace.local.state_dir import ProcessMark

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_EVERY_S = 0.02


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def mark(pid: int) -> ProcessMark | None:
    """Return the pid and start time that identify a process; None if it does not exist or is a zombie."""
    state = _stat(pid)
    return None if state is None or state[0] in "ZX" else ProcessMark(pid, state[2])


def is_alive(process: ProcessMark) -> bool:
    """Return whether this process still runs. A later process with the same pid does not count."""
    return mark(process.pid) == process


def descendants(ancestor: int) -> list[ProcessMark]:
    """Return the living descendants of a process, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (state := _stat(int(entry.name))) is not None:
            children.setdefault(state[1], []).append(int(entry.name))
    found: list[ProcessMark] = []
    generation = children.get(ancestor, [])
    while generation:
        found += [process for pid in generation if (process := mark(pid)) is not None]
        generation = [child for pid in generation for child in children.get(pid, [])]
    return found


class OrphanReaper:
    """Reaps ended processes that this process adopted from dead parents and that would otherwise stay zombies.

    Own children are reaped by the code that started them, before a second look finds them.
    """

    def __init__(self) -> None:
        self._seen = frozenset[ProcessMark]()

    def look(self) -> None:
        """Reap the zombie children that the previous call found too. It blocks for milliseconds."""
        found = frozenset(_zombies(os.getpid()))
        for process in found & self._seen:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
        self._seen = found


def _zombies(parent: int) -> Iterator[ProcessMark]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (state := _stat(int(entry.name))) is not None and state[:2] == ("Z", parent):
            yield ProcessMark(int(entry.name), state[2])


def end(processes: Iterable[ProcessMark], *, patience_s: float) -> list[ProcessMark]:
    """Send SIGTERM, and SIGKILL to the processes that still run after `patience_s`; return the killed processes."""
    remaining = [process for process in processes if is_alive(process)]
    for process in remaining:
        _send(process, signal.SIGTERM)
    remaining = wait_until_gone(remaining, timeout_s=patience_s)
    for process in remaining:
        _send(process, signal.SIGKILL)
    wait_until_gone(remaining, timeout_s=5.0)
    return remaining


def wait_until_gone(processes: Iterable[ProcessMark], *, timeout_s: float) -> list[ProcessMark]:
    """Wait for processes to end; return the ones that still run after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    remaining = [process for process in processes if is_alive(process)]
    while remaining and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
        remaining = [process for process in remaining if is_alive(process)]
    return remaining


def _send(process: ProcessMark, number: signal.Signals) -> None:
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Return a process's state letter, parent pid and start (clock ticks after boot); None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The process name in parentheses may itself contain parentheses and spaces.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[19])
