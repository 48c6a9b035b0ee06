"""Runs `headrace up` as a service manager does: starts it, and restarts it whenever it ends.

Everything that faults hit runs below one launcher, which is a child of this process. This process adopts orphans.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.client import HeadraceClient
from headrace.local import guarded_exec, process_table
from headrace.local.state_dir import ProcessMark, StateDir
from shared.errors import HeadraceError

_REPOSITORY = Path(__file__).resolve().parents[2]
_RESTART_PAUSE_S = 1.0
_API_TIMEOUT_S = 5.0
_SUBMIT_TIMEOUT_S = 60.0
_DOWN_PATIENCE_S = 90.0
WITNESS = "CHAOS_FSYNCS"


class Stack:
    """One launcher at a time, on one state directory.

    Args:
        state: The state directory.
        directory: Working directory of the launcher. It holds the reward modules and ``up.log``, the launcher's output.
        generators: Arguments of `headrace up` that select the generators.
        environment: Added to this process's environment.
        witness: File to which fsync_witness writes.
    """

    def __init__(
        self,
        state: StateDir,
        *,
        directory: Path,
        generators: Sequence[str],
        environment: Mapping[str, str],
        witness: Path,
    ) -> None:
        self.state = state
        self.witness = witness
        self.log = directory / "up.log"
        self._directory = directory
        path = os.pathsep.join([str(_REPOSITORY), str(Path(__file__).parent / "fsync_witness")])
        self._environment = {**os.environ, **environment, "PYTHONPATH": path, WITNESS: str(witness)}
        # It ends with this process, for any reason.
        up = [sys.executable, "-m", "headrace", "up", "--state-dir", str(state.path), *generators]
        self._command = [*guarded_exec.guard(), *up]
        self._once: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._ended_at: float | None = None
        self._client: HeadraceClient | None = None
        process_table.adopt_orphans()

    def supervise(self) -> None:
        """Start the launcher if it is not running. Must be called often."""
        self._reap()
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None and self._ended_at is None:
            self._ended_at = time.monotonic()
        if self._ended_at is not None and time.monotonic() - self._ended_at < _RESTART_PAUSE_S:
            return
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, *self._once], cwd=self._directory, env=self._environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._ended_at, self._once = None, []

    def restart_with(self, option: str) -> None:
        """Stop the launcher. It is started again with an additional option of `headrace up`, only this time."""
        self._once = [option]
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    @property
    def launcher(self) -> int | None:
        """The pid of the launcher; None if it is not running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def everybody(self) -> list[ProcessMark]:
        """Return the launcher and all processes below it."""
        if self.launcher is None:
            return []
        own = process_table.mark(self.launcher)
        return [*([own] if own is not None else []), *process_table.descendants(self.launcher)]

    def client(self) -> HeadraceClient | None:
        """Return a client of the run API, or None while its address is not known."""
        try:
            endpoint = self.state.endpoint()
            if endpoint is None:
                return None
            if self._client is None or self._client.base_url != endpoint.api_url:
                if self._client is not None:
                    self._client.close()
                self._client = HeadraceClient(
                    endpoint.api_url,
                    self.state.keys().api_key,
                    timeout_s=_API_TIMEOUT_S,
                    submit_timeout_s=_SUBMIT_TIMEOUT_S,
                )
        except (HeadraceError, OSError):
            return None
        return self._client

    def end(self) -> None:
        """Stop the stack as Ctrl-C does, and kill what does not stop."""
        if self.launcher is not None and self._process is not None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(timeout=_DOWN_PATIENCE_S)
            except subprocess.TimeoutExpired:
                kill(self.everybody())
                self._process.wait()
        if self._client is not None:
            self._client.close()
            self._client = None
        self._reap()

    def said(self) -> list[str]:
        """Return the launcher's output so far."""
        return self.log.read_text("utf-8", errors="replace").splitlines() if self.log.exists() else []

    def _reap(self) -> None:
        """Reap orphans that this process has adopted."""
        known = None if self._process is None else self._process.pid
        with contextlib.suppress(OSError):
            for name in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                if int(name) != known:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(int(name), os.WNOHANG)


def kill(processes: Sequence[ProcessMark]) -> None:
    """Kill processes at the same time: stop all first, so that they hardly see each other end, then kill all."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            send(process, number)
    process_table.wait_until_gone(processes, timeout_s=10.0)


def send(process: ProcessMark, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; return whether it still existed."""
    if not process_table.is_alive(process):
        return False
    try:
        os.kill(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
