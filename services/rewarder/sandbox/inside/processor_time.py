"""How much processor time the sandbox has had, how long its processes stood ready to run and had none, and how many.

Only the processes that the judge starts are asked how long they waited, one after the other at work: of many at a time
the sum says nothing. Read from /proc; a kernel that does not say is one where nobody waited.
"""

import os

_waited_s: dict[int, float] = {}


def _stats() -> list[list[str]]:
    """Return what /proc says of each process, from its state on; raises OSError."""
    found: list[list[str]] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                found.append(file.read().rpartition(")")[2].split())
        except OSError:  # it has just ended
            continue
    return found


def used_s() -> float:
    """Return the processor time of all processes of the sandbox, those that have ended included; raises OSError."""
    # Its own, and that of its children that have ended.
    return sum(sum(map(int, fields[11:15])) for fields in _stats()) / os.sysconf("SC_CLK_TCK")


def num_tasks() -> int:
    """Return how many threads there are in the sandbox, in all processes; raises OSError."""
    return sum(int(fields[17]) for fields in _stats())


def last_number() -> int:
    """Return the number of the thread that was made last, the how-manieth it is; 0 if the kernel does not say."""
    try:
        with open("/proc/loadavg", encoding="utf-8") as file:
            return int(file.read().split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


def note_waiting(pid: int) -> None:
    """Remember how long a process has waited so far: once it is gone, nobody can say."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="utf-8") as file:
            waited_s = int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        waited_s = 0.0
    _waited_s[pid] = max(waited_s, _waited_s.get(pid, 0.0))


def waited_s() -> float:
    """Return how long all of those that were noted have waited."""
    for pid in list(_waited_s):
        note_waiting(pid)
    return sum(_waited_s.values())


def num_noted() -> int:
    """Return how many processes were noted."""
    return len(_waited_s)
