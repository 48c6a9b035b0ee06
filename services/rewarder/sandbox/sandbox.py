"""The seam to whatever runs a program in isolation.

    program + stdin --> [no network, no files of the host, nothing that outlives it] --> Finished

A program is Python source. Whoever implements this runs it with no other isolation than promised here or not at all:
what cannot be isolated is refused with SandboxUnavailableError, never run.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

SCRATCH = "/scratch"
"""The one directory a program may write to, as it sees it."""


@dataclass(frozen=True)
class Limits:
    """What one program may use; ``cpu_s``, ``memory_bytes`` and ``file_bytes`` are of each of its processes."""

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    file_bytes: int = 8 << 20
    scratch_bytes: int = 16 << 20
    open_files: int = 64
    processes: int = 64
    output_bytes: int = 64 << 10


@dataclass(frozen=True)
class Finished:
    """How a program ended.

    Args:
        ended: By itself, or because a limit that is watched from outside was reached.
        exit_code: Negative is a signal; None if it is not known, or was killed from outside.
        stdout: At most ``output_bytes``.
        stderr: The beginning; of the sandbox itself if that failed.
    """

    ended: Literal["exited", "wall clock", "output"]
    exit_code: int | None
    stdout: bytes
    stderr: bytes


class SandboxUnavailableError(Exception):
    """There is no sandbox to run anything in; the message says how to get one."""


class Sandbox(Protocol):
    """Runs programs in isolation."""

    async def run(self, program: str, *, stdin: bytes = b"", limits: Limits) -> Finished:
        """Run a program to its end, as process 1 of a world of its own; everything it started ends with it.

        Raises:
            SandboxUnavailableError: It was not run.
        """
        ...

    def why_too_much(self, limits: Limits) -> str | None:
        """Return why no program can have as much as these limits allow, None if it can."""
        ...


_LIMIT = """
import resource
def _limit(kind, value):
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
"""


def with_limits(program: str, limits: Limits, *, counts_own_processes: bool = True) -> str:
    """Return the program with its own limits in front, as they can be set only inside.

    What the worker itself may not have, a program cannot be given: then its own hard limits apply.

    Args:
        program: Python.
        limits: What it may use.
        counts_own_processes: Whether the kernel counts its processes apart from all others of its user. If not, it is
            not limited here: the neighbours' would count.
    """
    values = {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_CORE": 0,
    } | ({"RLIMIT_NPROC": limits.processes} if counts_own_processes else {})
    lines = (f"_limit(resource.{name}, {value})" for name, value in values.items())
    return "\n".join([_LIMIT, *lines, "del resource, _limit", program])
