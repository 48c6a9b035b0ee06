"""All of headrace on this machine, started as a user starts it, for tests that kill parts of it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx

from headrace.client import ENDED, HeadraceApiError, HeadraceClient
from headrace.local.process_table import descendants
from headrace.local.state_dir import StateDir
from shared.service.tls import trusted

READY_TIMEOUT_S = 240


class Stack:
    """`headrace up` on a new state directory. Reward functions can be imported from ``directory``."""

    def __init__(
        self,
        directory: Path,
        *,
        num_generators: int = 1,
        num_simulated: int = 0,
        launcher: list[str] | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        self.state = StateDir(directory / "state")
        self.directory = directory
        generators = ["--simulate", str(num_simulated)] if num_simulated else ["--generators", str(num_generators)]
        up = ["-m", "headrace", "up", "--state-dir", str(self.state.path), *generators, *options]
        self._command = launcher or up
        self.said: list[str] = []
        self._output = directory / "up.log"

    def __enter__(self) -> Self:
        self._launcher = subprocess.Popen(
            [sys.executable, *self._command],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._launcher.stdout is not None
        for line in self._launcher.stdout:
            self.said.append(line)
            if line.startswith("Next:"):  # the last line that the launcher prints when it is up
                break
        else:
            self._launcher.communicate()
            raise AssertionError(f"headrace up ended before it was up: {''.join(self.said)}")
        endpoint = self.state.endpoint()
        assert endpoint is not None
        self.client = HeadraceClient(
            endpoint.api_url, self.state.keys().api_key, timeout_s=60, ca_file=endpoint.ca_file
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._launcher.send_signal(signal.SIGINT)
        self._launcher.communicate(timeout=120)
        self.exit_code = self._launcher.returncode

    def is_alive(self) -> bool:
        """Return whether the launcher still runs."""
        return self._launcher.poll() is None

    def kill(self) -> None:
        """End the launcher and its services."""
        self.__exit__()

    def wait_for_rewarder(self) -> None:
        """Wait until the services answer that a submit needs. Without vLLM, a test would come too early."""
        endpoint = self.state.endpoint()
        assert endpoint is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        for url in (f"{endpoint.rewarder_url}/readyz", f"{endpoint.sessions_url}/readyz"):
            while not _is_ready(url, ca_file=endpoint.ca_file):
                assert time.monotonic() < deadline, f"{url} did not come up"
                time.sleep(0.05)

    def service_pid(self, name: str) -> int:
        """Return the pid of a service: trainer, rewarder, generator-0, redis."""
        endpoint = self.state.endpoint()
        assert endpoint is not None
        return endpoint.processes[name].pid

    def wait_until_another(self, name: str, pid: int) -> None:
        """Wait until the launcher has restarted a service."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while self.service_pid(name) == pid:
            assert time.monotonic() < deadline, f"{name} was not started again"
            time.sleep(0.05)

    def rank_pid(self) -> int:
        """Return the pid of the training rank."""
        for process in descendants(self.service_pid("trainer")):
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ")
            if b"services.trainer.rank" in command:
                return process.pid
        raise AssertionError("no training rank is running")

    def everybody(self) -> list[int]:
        """Return the pids of the launcher and all its descendants."""
        return [self._launcher.pid, *(process.pid for process in descendants(self._launcher.pid))]

    def wait_for_step(self, run_id: str, step: int) -> None:
        """Read the run's events until an optimizer step was made."""
        for event in self.client.events(run_id):
            if event.kind == "metrics" and event.data["step"] >= step:
                return
        raise AssertionError(f"the run ended before step {step}: {self.client.get(run_id)}")

    def wait_until(self, run_id: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until a condition on the run is true; return its record. Its API may be unreachable meanwhile."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        run: dict[str, Any] = {}
        while time.monotonic() < deadline:
            with contextlib.suppress(HeadraceApiError):
                run = self.client.get(run_id)
                if is_so(run):
                    return run
            time.sleep(0.2)
        raise AssertionError(f"not true within {READY_TIMEOUT_S} s: {run}")

    def train(self, settings: dict[str, Any], *, groups_per_step: int) -> dict[str, Any]:
        """Submit a run and wait for its end. Assert that it has finished and lost no group; return its record."""
        run = self.wait_for_end(self.client.submit(settings).run_id)
        assert run["status"] == "finished", run
        assert_every_group_is_accounted_for(run, groups_per_step=groups_per_step)
        return run

    def wait_for_end(self, run_id: str) -> dict[str, Any]:
        """Read the run's events until it has ended; return its record."""
        for _ in self.client.events(run_id):
            pass
        run = self.client.get(run_id)
        assert run["status"] in ENDED
        return run


def _is_ready(url: str, *, ca_file: Path | None) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, trust_env=False, verify=trusted(ca_file), timeout=120).is_success
    return False


def ledger(run_dir: Path) -> dict[str, Any]:
    """Return the ledger of the newest checkpoint."""
    newest = max((run_dir / "checkpoints").glob("step_*"))
    state = json.loads((newest / "trainer_state.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = state["extra"]["ledger"]
    return found


def numbers(runs: list[list[int]]) -> list[int]:
    """Return the numbers in a list of ``[first, last]`` ranges."""
    return [number for first, last in runs for number in range(first, last + 1)]


def assert_every_group_is_accounted_for(run: dict[str, Any], *, groups_per_step: int) -> None:
    """Compare the ledger with the rollout log, which was written independently of it.

    Every admitted group was either trained or dropped with a reason. Each trained group was trained in exactly one step
    of the surviving weights, and each step trained the right number of groups.
    """
    run_dir = Path(run["run_dir"])
    kept = ledger(run_dir)
    assert "run_ended" not in kept["dropped"], "a finished run leaves no group under way"
    trained = numbers(kept["trained"])
    dropped = [number for runs in kept["dropped"].values() for number in numbers(runs)]
    assert sorted(trained + dropped) == list(range(kept["admitted"]))
    steps: dict[int, set[int]] = {}
    for path in (run_dir / "rollouts").glob("step_*.jsonl"):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        match = re.fullmatch(r"step_(\d+)", path.stem)
        assert match is not None
        steps[int(match[1])] = {int(row["group_id"]) for row in rows}
    assert sorted(steps) == list(range(1, run["progress"]["max_steps"] + 1))
    assert all(len(groups) == groups_per_step for groups in steps.values())
    assert sorted(number for groups in steps.values() for number in groups) == sorted(trained)
