"""Measures the sandbox from /proc: processor time used, time spent waiting for a processor, and number of processes.

Waiting time is read only for the judge and the processes that it starts, which work one after the other. The sum over
many processes at a time would mean nothing. If the kernel does not report waiting time, it counts as zero.
"""

import os

_waited_s: dict[int, float] = {}


def _stats() -> list[list[str]]:
    """Return the fields of /proc/PID/stat of each process, from its state on; raises OSError."""
    found: list[list[str]] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                found.append(file.read().rpartition(")")[2].split())
        except OSError:  # it has just ended
            continue
    return found


def used_s() -> float:
    """Return the processor time of all processes of the sandbox, including ended ones, in seconds; raises OSError."""
    # utime, stime, cutime, cstime: the process's own time, and the time of its ended children
    return sum(sum(map(int, fields[11:15])) for fields in _stats()) / os.sysconf("SC_CLK_TCK")


def num_tasks() -> int:
    """Return the number of threads in all processes of the sandbox; raises OSError."""
    return sum(int(fields[17]) for fields in _stats())


def last_number() -> int:
    """Return the id of the newest thread, or 0 if the kernel does not report it.

    Ids in the sandbox count up from 1, so it is also the number of threads made so far.
    """
    try:
        with open("/proc/loadavg", encoding="utf-8") as file:
            return int(file.read().split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


def note_waiting(pid: int) -> None:
    """Record how long a process has waited for a processor, which the kernel does not report after the process ends."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="utf-8") as file:
            waited_s = int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        waited_s = 0.0
    _waited_s[pid] = max(waited_s, _waited_s.get(pid, 0.0))


def waited_s() -> float:
    """Return how long all recorded processes together have waited for a processor, in seconds."""
    for pid in list(_waited_s):
        note_waiting(pid)
    return sum(_waited_s.values())


def num_noted() -> int:
    """Return the number of processes whose waiting time is recorded."""
    return len(_waited_s)
