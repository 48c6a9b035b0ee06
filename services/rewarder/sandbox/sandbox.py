"""The interface of sandboxes, which run a program in isolation.

    program + stdin --> [no network, system files only to read, nothing outlives it] --> Finished

A program is Python source. An implementation must isolate the program as described here. If it cannot, it must raise
SandboxUnavailableError and not run the program.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

SCRATCH = "/scratch"
"""The only directory a program may write to, as a path inside the sandbox."""


@dataclass(frozen=True)
class Limits:
    """The limits of one program. ``cpu_s``, ``memory_bytes``, ``file_bytes`` and ``open_files`` are per process."""

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
    """The result of a program: its end and its output.

    Args:
        ended: Whether it exited, or was killed from outside for its time or its output.
        exit_code: The exit code, or minus the signal number. None if unknown, or if it was killed from outside.
        stdout: The first ``output_bytes`` bytes of its output.
        stderr: The beginning of its stderr, or of the sandbox's own if the sandbox failed.
    """

    ended: Literal["exited", "wall clock", "output"]
    exit_code: int | None
    stdout: bytes
    stderr: bytes


class SandboxUnavailableError(Exception):
    """No sandbox can be used. The message says how to get one."""


class Sandbox(Protocol):
    """The interface of a sandbox, which runs Python programs in isolation."""

    async def run(self, program: str, *, stdin: bytes = b"", limits: Limits) -> Finished:
        """Run a program until it ends or reaches a limit, as process 1 of its own namespace. Its children end with it.

        Raises:
            SandboxUnavailableError: The program was not run, or the sandbox failed while it ran.
        """
        ...

    def why_too_much(self, limits: Limits) -> str | None:
        """Return the reason why programs in this sandbox cannot have these limits, or None if they can."""
        ...


_LIMIT = """
import resource
def _limit(kind, value):
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
"""


def with_limits(program: str, limits: Limits, *, counts_own_processes: bool = True) -> str:
    """Return the program with code in front that sets its limits, because they can only be set inside the sandbox.

    A limit above the hard limit inside the sandbox is lowered to the hard limit.

    Args:
        program: Python source.
        limits: The limits to set.
        counts_own_processes: Whether the kernel counts the sandbox's processes separately from other processes of the
            same user. If not, no process limit is set, because processes of other sandboxes would count too.
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
