"""The Redis of deploy/redis on a real server, with one user per service, and what it denies them.

start.sh --> users.acl --> Valkey (from the wheel) <-- trainer, generator, rewarder, sessions, each with its own user
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import redis

from tests.conftest import server_binary
from tests.kept_ports import kept_port

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
USERS = ("trainer", "generator", "rewarder", "sessions")
START_TIMEOUT_S = 20


@dataclass(frozen=True)
class Server:
    """A running server and the secrets of its users."""

    port: int
    secrets: Path

    def url(self, user: str) -> str:
        """Return the URL of one user."""
        password = (self.secrets / f"redis-password-{user}").read_text(encoding="utf-8")
        return f"redis://{user}:{password}@127.0.0.1:{self.port}/0"

    def client(self, user: str) -> Any:
        """Return a client of one user."""
        password = (self.secrets / f"redis-password-{user}").read_text(encoding="utf-8")
        return cast("Any", redis.Redis)(port=self.port, username=user, password=password, decode_responses=True)

    def launcher(self, state_dir: Path) -> list[str]:
        """Return the arguments for Python that start the launcher on this server, each service as its own user."""
        script = Path(__file__).with_name("launcher_with_users.py")
        return [str(script), str(state_dir), str(self.port), str(self.secrets)]


def start(
    directory: Path, secrets: Path, port: int, *, maxmemory: str = "2gb", limit: dict[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start the server as the image does, with one more user that may read which commands were denied.

    Args:
        directory: Directory for the server's data and scripts.
        secrets: Directory with the passwords.
        port: The server's port.
        maxmemory: The value of HEADRACE_REDIS_MAXMEMORY.
        limit: Files of the control group that limits its memory, by name; without them, its memory is not limited.
    """
    programs, scripts = directory / "bin", directory / "scripts"
    if not programs.exists():  # otherwise it would be restarted
        programs.mkdir()
        (programs / "valkey-server").symlink_to(server_binary())
        shutil.copytree(DEPLOY / "redis", scripts)
        with (scripts / "users.acl.template").open("a", encoding="utf-8") as rules:
            rules.write("user auditor on nopass resetkeys resetchannels -@all +acl|log\n")
    cgroup = directory / "cgroup"
    for name, content in (limit or {}).items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(content, encoding="utf-8")
    return subprocess.Popen(
        [
            scripts / "start.sh",
            *("--bind", "127.0.0.1", "--port", str(port)),
        ],
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HEADRACE_SECRETS_DIR": str(secrets),
            "HEADRACE_REDIS_DIR": str(directory),
            "HEADRACE_REDIS_USERS": str(directory / "users.acl"),
            "HEADRACE_REDIS_MAXMEMORY": maxmemory,
            "HEADRACE_CGROUP_DIR": str(cgroup),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@contextlib.contextmanager
def running(directory: Path, *, maxmemory: str = "2gb", limit: dict[str, str] | None = None) -> Generator[Server]:
    """Run a server as the image starts it, with secrets as `deploy/make-secrets` makes them."""
    secrets = directory / "secrets"
    if not secrets.exists():
        subprocess.run([DEPLOY / "make-secrets", secrets], check=True, capture_output=True)
    port = kept_port()
    with start(directory, secrets, port, maxmemory=maxmemory, limit=limit) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        assert process.poll() is None, process.stdout and process.stdout.read().decode()
        yield Server(port, secrets)
        process.kill()


@contextlib.contextmanager
def nothing_denied(server: Server) -> Generator[None]:
    """Assert at the end that no service was denied anything meanwhile."""
    auditor = cast("Any", redis.Redis)(port=server.port, username="auditor", password="any", decode_responses=True)
    with auditor:
        auditor.acl_log_reset()
        yield
        denied = {(entry["username"], entry["object"]) for entry in auditor.acl_log()}
    denied -= {(user, "function|load") for user in USERS}  # the trainer has loaded them
    # redis-py sends its name, and accepts a refusal.
    denied -= {(user, "client|setinfo") for user in (*USERS, "auditor")}
    assert not denied
