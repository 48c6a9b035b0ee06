"""The services as processes on this machine, wired as in the chart: a run is trained, and all are healthy.

    variables of the rendered containers, keys and passwords in their mounts   -->  the services, and trainer-node
    configuration, users and script of the rendered ConfigMap                  -->  Valkey
    the program of `helm test`, with the tiny model that it makes              -->  4 steps, policy versions above 0

Only addresses and ports differ. Generators are simulated; to all other services, they look like real ones.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart import CHART, SERVICES, Object, container, render, values_of, workloads
from tests.helm.chart_redis import ChartRedis
from tests.helm.inside import inside
from tests.kept_ports import kept_port

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODULES = dict(zip(SERVICES, SERVICES, strict=True)) | {"generator": "generator.simulated"}


class Wired:
    """A release whose pods are processes on this machine."""

    def __init__(self, objects: list[Object], root: Path) -> None:
        self.root = root
        self._objects = objects
        self._redis = ChartRedis(root)
        self._ports = {name: kept_port() for name in (*MODULES, "rendezvous")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def variables(self, workload: str) -> dict[str, str]:
        """Return the variables of its container, adapted to paths and ports on this machine."""
        given = inside(self._objects, workload, self.root).variables
        here = {
            "HEADRACE_HOST": "127.0.0.1",
            "HEADRACE_PORT": str(self._ports.get(workload, 0)),
            "HEADRACE_METRICS_PORT": "0",
            "HEADRACE_REDIS_URL": f"redis://{workload}@127.0.0.1:{self._redis.port}/0",
            "HEADRACE_REWARDER_URL": f"http://127.0.0.1:{self._ports['rewarder']}",
            "HEADRACE_SESSIONS_URL": f"http://127.0.0.1:{self._ports['sessions']}",
            "HEADRACE_PUSH_ADDRESS": "127.0.0.1",
            "HEADRACE_ADVERTISE_URL": f"http://127.0.0.1:{self._ports['generator']}",
            "HEADRACE_RENDEZVOUS_ENDPOINT": f"127.0.0.1:{self._ports['rendezvous']}",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        changed = {name: text for name, text in here.items() if name in given}
        return {**given, **changed, "PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def start(self) -> None:
        """Start everything, in no particular order."""
        self._redis.start()
        for name, module in MODULES.items():
            self._start(name, [sys.executable, "-m", f"services.{module}"])
        if "trainer-node" in workloads(self._objects):
            command = list(container(workloads(self._objects)["trainer-node"])["command"])
            command[0] = sys.executable
            command[command.index("--api") + 1] = self.api_url
            command[command.index("--heartbeat") + 1] = str(self.root / "tmp" / "heartbeat")
            variables = self.variables("trainer-node")
            name = variables["HEADRACE_REPLICA_ID"]
            self._start("trainer-node", [part.replace("$(HEADRACE_REPLICA_ID)", name) for part in command])

    def _start(self, name: str, command: list[str]) -> None:
        with (self.root / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(command, env=self.variables(name), stdout=log, stderr=log)

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self._ports['trainer']}"

    def helm_test(self, settings: dict[str, Any]) -> tuple[int, str]:
        """Run the program of `helm test`; return its exit status, and its output with that of all services."""
        script, key = str(CHART / "files" / "test" / "submit_run.py"), str(self.root / "run/secrets/headrace/api-key")
        arguments = [self.api_url, key, "200", json.dumps(settings), str(self.root / "models")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, script, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        logs = [f"{path.name}:\n{path.read_text()}" for path in sorted(self.root.rglob("*.log"))]
        return done.returncode, "\n".join([done.stdout, *logs])

    def probe(self, workload: str, probe: str) -> tuple[int, str]:
        """Run a probe as the kubelet would."""
        _, *command = container(workloads(self._objects)[workload])[probe]["exec"]["command"]
        done = subprocess.run(
            [sys.executable, *(part.replace("/tmp/", f"{self.root}/tmp/") for part in command)],
            env=self.variables(workload), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def end(self) -> dict[str, int]:
        """Ask all processes to end; return their exit statuses."""
        for process in self._processes.values():
            process.terminate()
        try:
            return {name: process.wait(timeout=90) for name, process in self._processes.items()}
        finally:
            self._redis.end()


@contextlib.contextmanager
def wired(objects: list[Object], root: Path) -> Generator[Wired]:
    release = Wired(objects, root)
    try:
        release.start()
        yield release
    finally:
        statuses = release.end()
    assert set(statuses.values()) == {0}, statuses


def test_a_release_passes_helm_test_and_its_probes(tmp_path: Path) -> None:
    with wired(render(values_of("values-kind.yaml")), tmp_path) as release:
        status, said = release.helm_test({})
        assert status == 0, said
        assert "5 of 5 pushes were confirmed" in said
        assert "NOPERM" not in said, "the Redis users may run the services' commands"
        for workload in MODULES:
            for probe in ("startupProbe", "readinessProbe"):
                assert release.probe(workload, probe)[0] == 0, f"{workload} {release.probe(workload, probe)}"


@pytest.mark.long
def test_ranks_of_two_nodes_train_one_run(tmp_path: Path) -> None:
    values = values_of("values-kind.yaml")
    values["trainer"]["multiNode"] = {"nodes": 2}
    for claim in ("runs", "models"):
        values["storage"][claim]["accessMode"] = "ReadWriteMany"
    with wired(render(values), tmp_path) as release:
        status, said = release.helm_test({"nnodes": 2, "nproc_per_node": 1})
        assert status == 0, said
        assert "node-1.log" in said
        assert release.probe("trainer-node", "livenessProbe") == (0, "")
