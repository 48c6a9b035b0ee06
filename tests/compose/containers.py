"""The stack of deploy/docker-compose.yml in a Docker engine: Compose starts and scales it, the SDK inspects it.

docker compose (command)  build, up, scale, run, down        docker SDK  kill, inspect, exec, logs, files
"""

import contextlib
import io
import json
import os
import subprocess
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.client import ENDED, HeadraceClient
from tests.compose.compose_file import DEPLOY

PROJECT = "headrace-test"
PORT = 18400
CONTAINERS = ("redis", "trainer-cpu", "rewarder", "sessions", "generator-cpu")
UP_TIMEOUT_S = 600
BACK_TIMEOUT_S = 180


class Containers:
    """One Compose project in the engine.

    Args:
        docker: The SDK's client.
        secrets: Directory with the secrets of this stack.
    """

    def __init__(self, docker: Any, secrets: Path) -> None:
        self.docker = docker
        self.secrets = secrets
        self._environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": PROJECT,
            "COMPOSE_PROFILES": "gpu",  # as in .env.example: --profile wins
            "HEADRACE_PUBLISHED_PORT": str(PORT),
            "HEADRACE_SECRETS": str(secrets),
            "HEADRACE_NUM_REWARD_WORKERS": "1",
            "HEADRACE_NUM_TOOL_WORKERS": "1",
            **_cores(),
        }

    def secret(self, name: str) -> str:
        """Return the content of a secret."""
        return (self.secrets / name).read_text(encoding="utf-8").strip()

    def compose(
        self,
        *arguments: str,
        profiles: Sequence[str] = ("cpu",),
        overrides: Sequence[Path] = (),
        timeout_s: float = UP_TIMEOUT_S,
    ) -> str:
        """Run `docker compose` on deploy/docker-compose.yml and ``overrides``, and return what it prints."""
        command = ["docker", "compose", "--env-file", os.devnull]
        for file in (DEPLOY / "docker-compose.yml", *overrides):
            command += ["-f", str(file)]
        for profile in profiles:
            command += ["--profile", profile]
        done = subprocess.run(
            [*command, *arguments],
            env=self._environment, capture_output=True, text=True, timeout=timeout_s,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"docker compose {' '.join(arguments)}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    def up(self, *arguments: str, profile: str = "cpu", overrides: Sequence[Path] = ()) -> None:
        """Start the missing containers, and wait until all are healthy."""
        self.compose(
            "up", "-d", "--no-build", "--wait", "--wait-timeout", str(UP_TIMEOUT_S), *arguments,
            profiles=(profile,), overrides=overrides, timeout_s=UP_TIMEOUT_S + 60,
        )  # fmt: skip

    def all_of(self, service: str) -> list[Any]:
        """Return the containers of a service, in order."""
        found = self.docker.containers.list(
            all=True,
            filters={
                "label": [f"com.docker.compose.project={PROJECT}", f"com.docker.compose.service={service}",
                          "com.docker.compose.oneoff=False"],
            },
        )  # fmt: skip
        return sorted(found, key=lambda container: int(container.labels["com.docker.compose.container-number"]))

    def one(self, service: str) -> Any:
        """Return the only container of a service."""
        (container,) = self.all_of(service)
        return container

    def inside(self, container: Any, *command: str) -> str:
        """Run a command in a container and return what it prints."""
        status, output = container.exec_run(list(command))
        text = str(output.decode(errors="replace"))
        assert status == 0, f"{container.name}: {command}: {text}"
        return text

    def python(self, container: Any, code: str, *arguments: str) -> str:
        """Run Python in the container of a headrace service."""
        return self.inside(container, "python3", "-c", code, *arguments)

    def copy_out(self, container: Any, path: str, target: Path) -> Path:
        """Copy a directory out of a container, and return the path of the copy."""
        stream, _ = container.get_archive(path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
            archive.extractall(target, filter="data")
        return target / Path(path).name

    def logs(self) -> str:
        """Return the logs of all containers."""
        return "\n".join(
            container.logs().decode(errors="replace") for service in CONTAINERS for container in self.all_of(service)
        )

    def api(self) -> HeadraceClient:
        """Return a client for the published port."""
        return HeadraceClient(f"http://127.0.0.1:{PORT}", self.secret("api-key"), timeout_s=60)

    def wait_until_healthy(self, service: str) -> None:
        """Wait until every container of a service runs and is healthy."""

        def is_healthy() -> bool:
            states = [container.attrs["State"] for container in self.all_of(service)]
            return bool(states) and all(
                state["Running"] and state.get("Health", {}).get("Status") == "healthy" for state in states
            )

        wait_until(is_healthy, what=f"{service} is healthy", timeout_s=BACK_TIMEOUT_S)


def wait_until(holds: Callable[[], bool], *, what: str, timeout_s: float) -> None:
    """Poll until the condition is true."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if holds():
                return
        time.sleep(0.5)
    raise AssertionError(f"after {timeout_s:.0f} s it is not so that {what}")


def wait_for_step(client: Callable[[], HeadraceClient], run_id: str, step: int, *, timeout_s: float) -> None:
    """Wait until a run has made this many steps. The API may be unreachable meanwhile."""

    def is_there() -> bool:
        run = read_run(client, run_id)
        assert run is None or run["status"] not in ENDED or run["progress"]["step"] >= step, run
        return run is not None and int(run["progress"]["step"]) >= step

    wait_until(is_there, what=f"the run has made step {step}", timeout_s=timeout_s)


def wait_for_end(client: Callable[[], HeadraceClient], run_id: str, *, timeout_s: float) -> dict[str, Any]:
    """Wait until a run has ended, and return its record."""
    ended: list[dict[str, Any]] = []

    def has_ended() -> bool:
        run = read_run(client, run_id)
        if run is not None and run["status"] in ENDED:
            ended.append(run)
        return bool(ended)

    wait_until(has_ended, what="the run has ended", timeout_s=timeout_s)
    return ended[0]


def read_run(client: Callable[[], HeadraceClient], run_id: str) -> dict[str, Any] | None:
    """Return a run's record; None while the API is unreachable."""
    from headrace.client import HeadraceApiError

    try:
        with client() as one:
            return one.get(run_id)
    except HeadraceApiError:
        return None


def listening(table: str) -> set[tuple[str, int]]:
    """Return (address, port) of all listening sockets in /proc/net/tcp or tcp6, except loopback."""
    found: set[tuple[str, int]] = set()
    for line in table.splitlines():
        fields = line.split()
        if len(fields) < 4 or fields[3] != "0A":
            continue
        address, _, port = fields[1].partition(":")
        raw = b"".join(bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8))
        if len(raw) == 16 and raw[:12] == b"\0" * 10 + b"\xff\xff":
            raw = raw[12:]
        text = ".".join(str(byte) for byte in raw) if len(raw) == 4 else raw.hex(":", 2)
        if not text.startswith("127.") and raw != b"\0" * 15 + b"\1":
            found.add(("*" if not any(raw) else text, int(port, 16)))
    return found


def demo_run(**changes: Any) -> dict[str, Any]:
    """Return the documented run of the demo."""
    run: dict[str, Any] = json.loads((DEPLOY / "demo" / "run.json").read_text(encoding="utf-8"))
    return {**run, **changes}


def _cores() -> dict[str, str]:
    """Give trainer and generators separate cores, as `headrace up` does."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return {}
    half = len(cores) // 2
    return {
        "HEADRACE_CPU_GENERATOR_CPUS": ",".join(map(str, cores[:half])),
        "HEADRACE_CPU_TRAINER_CPUS": ",".join(map(str, cores[half:])),
    }
