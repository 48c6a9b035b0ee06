"""A launcher with stand-in services, in a separate process, which a test may control, signal and kill."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from headrace.local import process_table
from headrace.local.state_dir import Endpoint, ProcessMark, StateDir

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 120.0
_FoundT = TypeVar("_FoundT")


def wait_for(look: Callable[[], _FoundT | None], what: str) -> _FoundT:
    """Return the result of `look` as soon as it is true."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"waited {PATIENCE_S:.0f} s for {what}")


def local_service(directory: Path, api_url: str, *, rewarder_url: str = "", redis_url: str = "") -> StateDir:
    """Write the services' addresses as a launcher would. This process plays the launcher."""
    launcher = process_table.mark(os.getpid())
    assert launcher is not None
    state = StateDir(directory)
    state.make()
    state.write_redis_url(redis_url)
    state.write_endpoint(Endpoint(api_url, rewarder_url or api_url, (), launcher=launcher, processes={}, is_ready=True))
    return state


ALL = ("trainer", "rewarder", "sessions", "generator")


class LauncherRig:
    """One launcher at a time on one state directory. The services in `stand_ins` are replaced by stand-ins."""

    def __init__(self, directory: Path, *, stand_ins: tuple[str, ...] = ALL, silent_s: float | None = None) -> None:
        self.state = StateDir(directory / "state")
        self._stand_ins = stand_ins
        self._patience = {} if silent_s is None else {"SILENT_S": str(silent_s)}
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._seen: set[ProcessMark] = set()

    def order(self, name: str, **orders: Any) -> None:
        """Set what a stand-in does at its next start."""
        (self._directory / f"{name}.orders").write_text(json.dumps(orders))

    def let_save(self, name: str) -> None:
        """Let a stand-in end that was ordered to save first."""
        (self._directory / f"{name}.saved").touch()

    def launch(
        self, *, num_generators: int = 1, repairs_redis: bool = False, output: Path | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a launcher, which prints to ``output``, by default a file of the rig."""
        script = Path(__file__).with_name("run_launcher.py")
        command = [sys.executable, str(script), str(self.state.path), str(self._directory), str(num_generators)]
        command += self._stand_ins
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **self._patience}
        if repairs_redis:
            environment["HEADRACE_TEST_REPAIRS_REDIS"] = "1"
        with (output or self._directory / "output").open("ab") as file:
            process = subprocess.Popen(command, cwd=self._directory, env=environment, stdout=file, stderr=file)
        self._processes.append(process)
        return process

    def launch_until_ready(self, *, num_generators: int = 1) -> "subprocess.Popen[bytes]":
        """Start a launcher and wait until its API answers."""
        num_before = self._num_starts()
        process = self.launch(num_generators=num_generators)
        num_new = len(self._stand_ins) - 1 + num_generators
        wait_for(lambda: self._num_starts() >= num_before + num_new, "every stand-in to start")
        self.wait_until_ready(process)
        return process

    def wait_until_ready(self, launcher: "subprocess.Popen[bytes]") -> None:
        """Wait until the API of a launcher answers."""
        wait_for(lambda: self._is_ready(launcher), f"the launcher, which said: {self.output()}")
        self.processes_of(launcher)

    def endpoint(self) -> Endpoint:
        """Return the addresses that the launcher wrote."""
        endpoint = self.state.endpoint()
        assert endpoint is not None
        return endpoint

    def output(self) -> str:
        """Return the output of the launchers so far."""
        path = self._directory / "output"
        return path.read_text() if path.exists() else ""

    def starts(self, name: str) -> list[dict[str, Any]]:
        """Return the starts of a stand-in."""
        path = self._directory / f"{name}.starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def stopped(self) -> list[str]:
        """Return the stand-ins that ended on request, in order."""
        path = self._directory / "stopped"
        return path.read_text().split() if path.exists() else []

    def processes_of(self, launcher: "subprocess.Popen[bytes]") -> list[ProcessMark]:
        """Return the living descendants of a launcher, and remember them for the cleanup."""
        found = process_table.descendants(launcher.pid)
        self._seen |= set(found)
        return found

    def end(self) -> list[ProcessMark]:
        """Kill the remaining processes at the end of a test, and return them."""
        for process in self._processes:
            if process.poll() is None:
                self.processes_of(process)
                process.send_signal(signal.SIGKILL)
            process.wait(timeout=PATIENCE_S)
        return process_table.end(self._seen, patience_s=0.0)

    def _num_starts(self) -> int:
        return sum(len(self.starts(name)) for name in self._stand_ins)

    def _is_ready(self, process: "subprocess.Popen[bytes]") -> bool:
        assert process.poll() is None, f"the launcher ended with {process.returncode} and said: {self.output()}"
        endpoint = self.state.endpoint()
        return endpoint is not None and endpoint.is_ready and endpoint.launcher.pid == process.pid
