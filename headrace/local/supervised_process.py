"""Keeps one service alive: starts it, restarts it after a crash, and ends it on request.

    start --> runs --> exit 2 or 3   the service refuses to run: no restart, its message is shown
                |----> any other exit: restart after a pause that doubles, up to ten seconds
                |----> cannot be started, for example if its log cannot be opened: tried again in the same way
                |----> silent for a minute (hang_watch.py): SIGKILL to its process group, then restart in the same way
                +----> end(): SIGTERM, and SIGKILL to its process group after stop_timeout_s

Exit statuses of all services: 0 asked to stop, 1 crash, 2 a user's error, 3 replaced by a newer process.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.local import guarded_exec, process_table
from headrace.local.hang_watch import Question, until_it_hangs
from headrace.local.held_port import HeldPort
from headrace.local.state_dir import ProcessMark
from shared.errors import UserError
from shared.service.child_secrets import handed_on
from shared.service.logs import last_message
from shared.service.signal_names import signal_name

USER_ERROR, FENCED = 2, 3
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 10.0
_HEALTHY_AFTER_S = 60.0
_TAIL_BYTES = 8192


@dataclass(frozen=True)
class ServiceSpec:
    """Command, environment, ports and limits of one service."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    secrets: Mapping[str, str] = field(kw_only=True, default_factory=dict[str, str], repr=False)
    """Secrets by the ``..._FILE`` variable that names their file, so that no environment contains them."""
    log_path: Path
    is_essential: bool
    stop_timeout_s: float
    question: Question
    """Sent every few seconds, to detect a hang."""
    listeners: Mapping[str, HeldPort] = field(default_factory=dict[str, HeldPort])
    """Ports that are handed on to the service, by name. While it is down, they refuse connections."""
    why_hopeless: Callable[[str], str] = lambda _: ""
    """Takes the last log message of a failed service; returns why a restart would fail too, or an empty string."""


class SupervisedProcess:
    """Runs one service as a child process, and restarts it after a crash.

    Args:
        spec: The service.
        say: Prints a line for the user.
        on_start: Called after each start, when the service has a new pid.
    """

    def __init__(self, spec: ServiceSpec, *, say: Callable[[str], None], on_start: Callable[[], None]) -> None:
        self.spec = spec
        self.process: ProcessMark | None = None
        self.num_starts = 0
        self._say = say
        self._on_start = on_start
        self._is_ending = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._log_starts_at = 0

    async def keep_alive(self) -> int | None:
        """Run the service, and restart it after crashes, until `end` is called or it refuses to run.

        Returns:
            None after `end`; 3 if a newer process replaced the service; 2 if it refused, or a restart would fail too.
        """
        pause_s = _FIRST_PAUSE_S
        try:
            while not self._is_ending.is_set():
                started_at = time.monotonic()
                code: int | None = None
                try:
                    child = await self._start()
                except OSError as error:
                    ended = f"cannot be started ({error})"
                else:
                    code = await self._until_it_ends(child)
                    ended = _describe(code) + (f" ({self.last_words()})" if code > 0 else "")
                if self._is_ending.is_set():
                    return None
                if code in (USER_ERROR, FENCED):
                    self._say(f"{self.spec.name} gave up: {self.last_words()} (log: {self.spec.log_path})")
                    return code
                if code not in (None, -signal.SIGKILL, -signal.SIGTERM):
                    reason = await self._why_hopeless()
                    if reason:
                        self._say(f"{self.spec.name} gave up: {reason} (log: {self.spec.log_path})")
                        return USER_ERROR
                if time.monotonic() - started_at > _HEALTHY_AFTER_S:
                    pause_s = _FIRST_PAUSE_S
                self._say(f"{self.spec.name} {ended}; starting it again in {pause_s:.1f} s (log: {self.spec.log_path})")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._is_ending.wait()
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            return None
        finally:
            self._has_ended.set()

    def start_no_more(self) -> None:
        """From now on, do not restart the service when it ends."""
        self._is_ending.set()

    async def end(self, *, hurry: asyncio.Event) -> bool:
        """Ask the service to end and wait. Kill it after `stop_timeout_s`, or when `hurry` is set.

        Returns:
            False if the service had to be killed.
        """
        self.start_no_more()
        process = self.process
        if process is not None and process_table.is_alive(process):
            _signal(process, signal.SIGTERM)
        if await _first_of(self._has_ended, hurry, timeout_s=self.spec.stop_timeout_s):
            return True
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        await self._has_ended.wait()
        return False

    def last_words(self) -> str:
        """Return the last message logged since the newest start; "no log" or "it logged no message" without one."""
        try:
            with self.spec.log_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_starts_at, size - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return "no log"
        return last_message(lines) or "it logged no message"

    async def _why_hopeless(self) -> str:
        try:
            return await asyncio.to_thread(self.spec.why_hopeless, self.last_words())
        except (OSError, UserError):  # it cannot be found out now, so the service is started again
            return ""

    async def _start(self) -> asyncio.subprocess.Process:
        """Start the service.

        Raises:
            OSError: Its log cannot be opened, its interpreter is missing, or the machine has no room for a process.
        """
        sockets = {name: port.fileno() for name, port in self.spec.listeners.items()}
        self.spec.log_path.parent.mkdir(mode=0o700, exist_ok=True)
        with self.spec.log_path.open("ab") as log_file, handed_on(self.spec.secrets) as (variables, secrets):
            self._log_starts_at = log_file.seek(0, os.SEEK_END)
            return await asyncio.create_subprocess_exec(
                *guarded_exec.guard(sockets),
                *self.spec.command,
                pass_fds=(*sockets.values(), *secrets),
                env={**self.spec.environment, **variables},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                # Only the launcher gets Ctrl-C from the terminal; it ends its services in order.
                start_new_session=True,
            )

    async def _until_it_ends(self, child: asyncio.subprocess.Process) -> int:
        """Wait until a service that was just started ends, and return its exit status. A hanging service is killed."""
        self.process = process_table.mark(child.pid)
        self.num_starts += 1
        self._on_start()
        if self._is_ending.is_set() and self.process is not None:
            _signal(self.process, signal.SIGTERM)
        try:
            async with asyncio.TaskGroup() as beside:
                hanging = beside.create_task(self._end_if_it_hangs(child.pid), name=f"does {self.spec.name} hang")
                code = await child.wait()
                hanging.cancel()
            return code
        finally:
            for port in self.spec.listeners.values():
                port.refuse_callers()

    async def _end_if_it_hangs(self, pid: int) -> None:
        """Kill the service and its process group once it hangs, unless `end` was called, which has its own deadline."""
        silent_s = await until_it_hangs(self.spec.question)
        if self._is_ending.is_set():
            return
        self._say(f"{self.spec.name} has not reacted for {silent_s:.0f} s: it hangs, and is killed")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _signal(process: ProcessMark, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def _describe(code: int) -> str:
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"ended with exit status {code}"


async def _first_of(event: asyncio.Event, hurry: asyncio.Event, *, timeout_s: float) -> bool:
    """Wait for either event, for at most ``timeout_s``. Return whether ``event`` is set."""
    waits = [
        asyncio.create_task(event.wait(), name="wait for the end"),
        asyncio.create_task(hurry.wait(), name="wait for hurry"),
    ]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()
    return event.is_set()
