"""The services as real processes, each with a metrics port, for tests of hostile clients."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import httpx

from headrace.local import guarded_exec
from headrace.local.held_port import HeldPort

ROOT = Path(__file__).parents[2]
KEY, INTERNAL_KEY = "key-of-the-test", "internal-key-of-the-test"
SERVICES: Final = ("trainer", "rewarder", "generator", "sessions")
_MODULES: Final = {
    "trainer": "services.trainer",
    "rewarder": "services.rewarder",
    "generator": "services.generator.simulated",
    "sessions": "services.sessions",
}

_METER: Final = [str(Path(__file__).parent / "loop_meter.py")]


class ServiceProcess:
    """One service on sockets that are already bound. It is alive when the constructor returns.

    Args:
        kind: trainer, rewarder, generator or sessions.
        redis_url: The URL of Redis.
        directory: Directory for its log and its runs.
        settings: Additional environment variables.
    """

    def __init__(self, kind: str, redis_url: str, directory: Path, **settings: str) -> None:
        self.kind = kind
        self.log_file = directory / f"{kind}.log"
        self.meter_file = directory / f"{kind}.callbacks"
        self.meter_file.touch()
        self._ports = {"http": HeldPort(), "metrics": HeldPort()}
        self.port, self.metrics_port = (port.number for port in self._ports.values())
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")} | {
            "HEADRACE_REDIS_URL": redis_url,
            "HEADRACE_PORT": str(self.port),
            "HEADRACE_METRICS_PORT": str(self.metrics_port),
            "HEADRACE_API_KEY": KEY,
            "HEADRACE_INTERNAL_KEY": INTERNAL_KEY,
            "HEADRACE_REPLICA_ID": f"{kind}-of-the-test",
            "HEADRACE_LOG_FORMAT": "text",
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            **({"HEADRACE_RUNS_DIR": str(directory / "runs")} if kind == "trainer" else {}),
            **({"HEADRACE_NUM_REWARD_WORKERS": "1"} if kind == "rewarder" else {}),
            **settings,
        }
        sockets = {name: port.fileno() for name, port in self._ports.items()}
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*guarded_exec.guard(sockets), sys.executable, *_METER, str(self.meter_file), _MODULES[kind]],
                cwd=directory,
                env=environment,
                pass_fds=tuple(sockets.values()),
                stdout=log,
                stderr=log,
            )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.kill()
            raise

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        return self.process.poll() is None

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + 120
        with httpx.Client(trust_env=False, timeout=120) as asking:  # one: each loads all CAs
            while not self._answers(asking):
                assert self.is_alive(), self.log()
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.02)

    def _answers(self, asking: httpx.Client) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return asking.get(f"http://127.0.0.1:{self.port}/livez").is_success
        return False

    def client(self, key: str = KEY) -> httpx.AsyncClient:
        """Return a client with a key."""
        return httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"Authorization": f"Bearer {key}"},
            timeout=120,
            trust_env=False,
        )

    def longest_callback_ms(self, *, since: int = 0) -> float:
        """Return the processor time of the event loop's longest callback after the first ``num_callbacks``."""
        lines = self.meter_file.read_text(encoding="utf-8").splitlines()[since:]
        return max((float(line.split()[0]) for line in lines), default=0.0)

    def num_callbacks(self) -> int:
        """Return the number of slow callbacks so far; see loop_meter.py."""
        return len(self.meter_file.read_text(encoding="utf-8").splitlines())

    def log(self) -> str:
        """Return its whole log."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def end(self) -> int:
        """Ask the service to stop, and return its exit status."""
        if self.is_alive():
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=120)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it with SIGKILL, and release its ports."""
        self.process.kill()
        self.process.wait(timeout=120)
        for port in self._ports.values():
            port.close()
