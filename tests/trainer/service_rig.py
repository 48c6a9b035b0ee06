"""The process ``python -m services.trainer``, and functions to wait for it."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.trainer.api_rig import KEY

ROOT = Path(__file__).resolve().parents[2]
Run = dict[str, Any]


class Service:
    """A running trainer service."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self._log = log
        self.port = int(environment["HEADRACE_PORT"])
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.trainer"], cwd=ROOT, env=environment, stdout=output, stderr=output
            )
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=120,
            trust_env=False,
        )

    def log(self) -> str:
        return self._log.read_text()

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log()
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/readyz").status_code == 200
        return False

    def submit(self, run: Run) -> str:
        reply = self.client.post("/v1/runs", json=run)
        assert reply.status_code == 202, reply.text
        return str(reply.json()["run"]["run_id"])

    def status(self, run_id: str) -> str:
        return str(self.client.get(f"/v1/runs/{run_id}").json()["status"])

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait(timeout=120)


Start = Callable[..., Service]


def wait_until(is_true: Callable[[], bool], *, timeout_s: float = 120.0) -> None:
    """Poll until ``is_true()``."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
