"""One training rank as a child process: starts, pins, logs and stops it. It never outlives its parent.

    run_dir/rank.log   all output, over all restarts

The kernel kills the rank when the run API dies, even by kill -9 (PR_SET_PDEATHSIG). The rank leads its own process
group, so that Ctrl-C in a terminal reaches only the API, and so that a kill also ends the rank's children.
"""

import asyncio
import contextlib
import ctypes
import functools
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shared.errors import UserError
from shared.service.logs import last_message

_NO_COMMAND = (FileNotFoundError, NotADirectoryError, PermissionError)
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 16 * 1024
_MAX_LINE = 500


class RankProcess:
    """A running or ended rank; create it with ``RankProcess.start``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, command: Sequence[str], *, log: Path, environment: Mapping[str, str], cpus: Sequence[int] | None
    ) -> "RankProcess":
        """Start ``command``, pinned to ``cpus`` if given, with its output appended to ``log``.

        Raises:
            UserError: The command cannot be run.
            OSError: The log cannot be written, or the system has no memory or process for the rank.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=dict(environment),
                    start_new_session=True,
                    preexec_fn=_prepare_child(cpus),
                )
            except (*_NO_COMMAND, subprocess.SubprocessError) as error:
                message = f"the training rank could not be started ({error}); the command was {command}"
                raise UserError(message) from error
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id and process group id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the exit status is known."""
        return self._process.returncode is not None

    async def wait(self) -> int:
        """Return the exit status; a negative one is the signal that killed the rank."""
        return await self._process.wait()

    async def wait_for(self, timeout_s: float) -> int | None:
        """Return the exit status, or None if the rank still runs after ``timeout_s`` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._process.wait()
        except TimeoutError:
            return None

    async def stop(self, *, grace_s: float) -> int:
        """Send the rank SIGTERM, and its process group SIGKILL after ``grace_s`` seconds; return the exit status."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        status = await self.wait_for(grace_s)
        if status is None:
            self.kill()
            status = await self.wait()
        return status

    def kill(self) -> None:
        """Send SIGKILL to the rank and its children, unless it has ended."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def last_line(log: Path) -> str:
    """Return the last message of a rank's log as one line, to be quoted; empty without messages."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return " ".join(last_message(lines).split())[:_MAX_LINE]


def _prepare_child(cpus: Sequence[int] | None) -> Callable[[], None]:
    """Return the function that the child runs between fork and exec. All it needs is prepared before the fork."""
    parent = os.getpid()
    die_with_parent = functools.partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    def prepare() -> None:
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)  # the parent died before prctl took effect
        if cpus is not None:
            os.sched_setaffinity(0, cpus)

    return prepare
