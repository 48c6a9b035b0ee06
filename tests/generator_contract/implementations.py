"""The generators that the contract is tested on, and how each is started.

To test another generator, set HEADRACE_CONTRACT_COMMAND to its command, and HEADRACE_CONTRACT_TRANSPORT to the
transport over which it receives weights (gloo, or auto for the transport that it reports). It is started with the
environment of `python -m services.generator`, listens on HEADRACE_PORT, and ends at SIGTERM.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx
import pytest
from _pytest.mark import ParameterSet

from tests.kept_ports import kept_port
from tests.plain_http import NO_TLS

API_KEY, INTERNAL_KEY = "public", "internal"
REPOSITORY = Path(__file__).parents[2]
_ALIVE_WITHIN_S = 120.0
_VLLM = (sys.executable, "-m", "services.generator")
_SIMULATED = (sys.executable, "-m", "services.generator.simulated")
# Slow enough to be caught in the middle of a completion, fast enough for a test.
_PACE = {"HEADRACE_SIMULATED_SPEED_UP": "3", "HEADRACE_SIMULATED_COMPLETION_TOKENS": "120"}


@dataclass(frozen=True)
class Implementation:
    """One implementation of the contract."""

    name: str
    command: tuple[str, ...]
    transport: Literal["auto", "gloo"] = "gloo"
    environment: dict[str, str] = field(default_factory=dict[str, str])


def _implementations() -> list[Implementation]:
    named = os.environ.get("HEADRACE_CONTRACT_COMMAND")
    if named is None:
        over_gloo = _PACE | {"HEADRACE_SIMULATED_TRANSPORT": "gloo"}
        return [
            Implementation("simulated", _SIMULATED, "auto", _PACE),
            Implementation("simulated over gloo", _SIMULATED, "gloo", over_gloo),
            Implementation("vllm", _VLLM),
        ]
    is_gloo = os.environ.get("HEADRACE_CONTRACT_TRANSPORT", "gloo") == "gloo"
    return [Implementation("yours", tuple(shlex.split(named)), "gloo" if is_gloo else "auto")]


IMPLEMENTATIONS = _implementations()


def parameters(*more_marks_on_vllm: pytest.MarkDecorator) -> list[ParameterSet]:
    """Return all implementations as parameters of the fixture ``implementation``."""
    on_vllm = (pytest.mark.vllm, pytest.mark.slow, *more_marks_on_vllm)
    return [pytest.param(one, id=one.name, marks=on_vllm if one.name == "vllm" else ()) for one in IMPLEMENTATIONS]


starts_engines = pytest.mark.parametrize("implementation", parameters(pytest.mark.long), indirect=True)
"""For a test that starts its own engines, which takes vLLM a minute."""


class GeneratorProcess:
    """A generator process, observed from outside.

    Args:
        implementation: How it is started.
        redis_url: The Redis of all services.
        replica_id: The replica's name, which stays the same after a restart.
        log: File for its output.
    """

    def __init__(self, implementation: Implementation, redis_url: str, replica_id: str, log: Path) -> None:
        self.replica_id = replica_id
        self.url = f"http://127.0.0.1:{kept_port()}"
        self._log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                implementation.command,
                cwd=REPOSITORY,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={
                    **os.environ,
                    "HEADRACE_REDIS_URL": redis_url,
                    "HEADRACE_HOST": "127.0.0.1",
                    "HEADRACE_PORT": self.url.rpartition(":")[2],
                    "HEADRACE_API_KEY": API_KEY,
                    "HEADRACE_INTERNAL_KEY": INTERNAL_KEY,
                    "HEADRACE_REPLICA_ID": replica_id,
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": "1",
                    **implementation.environment,
                },
            )

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        return self.process.poll() is None

    def wait_until_alive(self) -> None:
        """Wait for /livez, which works before there is an engine."""
        deadline = time.monotonic() + _ALIVE_WITHIN_S
        while True:
            assert self.is_alive(), f"it ended with {self.process.returncode}: {self.said()}"
            assert time.monotonic() < deadline, f"it does not answer: {self.said()}"
            with contextlib.suppress(httpx.TransportError):
                assert httpx.get(f"{self.url}/livez", timeout=120, trust_env=False, verify=NO_TLS).is_success
                return
            time.sleep(0.05)

    def client(self, key: str = "") -> httpx.AsyncClient:
        """Return an HTTP client of the generator."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120, trust_env=False, verify=NO_TLS)

    async def reason(self) -> str:
        """Return what /readyz says it is waiting for; empty if it is ready or does not answer."""
        with contextlib.suppress(httpx.TransportError):
            async with self.client() as client:
                answer = await client.get("/readyz")
            return str(answer.json().get("reason", ""))
        return ""

    async def is_ready(self) -> bool:
        """Whether /readyz reports that it is ready."""
        assert self.process.poll() is None, self.said()
        with contextlib.suppress(httpx.TransportError):
            async with self.client() as client:
                return (await client.get("/readyz")).status_code == 200
        return False

    def said(self) -> str:
        """Return the end of its log."""
        return self._log.read_text(errors="replace")[-6000:]

    def kill(self) -> None:
        """Kill it and its descendants with SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=120)
        self._wait_for_children()

    def terminate(self, *, within_s: float) -> int:
        """Ask it to stop, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=within_s)

    def _wait_for_children(self) -> None:
        """Wait for engines, which may be in their own process sessions and end after their parent."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                os.killpg(self.process.pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            time.sleep(0.02)
