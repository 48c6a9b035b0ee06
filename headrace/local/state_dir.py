"""The state directory, in which `headrace up` keeps its keys, addresses, logs and data.

    .headrace/         0700   used by one launcher at a time
      keys/            0600   api_key, internal_key, redis_password: made once and kept; api_keys: named keys
      lock                    held by the launcher as long as it lives
      endpoint.json    0600   the services' addresses; exists only while they run
      redis_url        0600   the URL of their Redis, with its password; exists only while they run
      generators       0600   the wanted number of generators; exists only after `headrace scale`
      functions/              functions of Python scripts, on the path of rewarder and sessions service
      inputs/                 data sets and models of Python scripts
      logs/  redis/  runs/

Each secret has its own file, so that a shell can use $(cat .headrace/keys/api_key).
"""

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from shared.access.named_keys import HEADER
from shared.errors import UserError

STATE_DIR_VARIABLE = "HEADRACE_STATE_DIR"
DEFAULT_STATE_DIR = ".headrace"
_KEY_BYTES = 24


@dataclass(frozen=True)
class Keys:
    """The API key, internal key and Redis password of the services of one state directory."""

    api_key: str = field(repr=False)
    internal_key: str = field(repr=False)
    redis_password: str = field(repr=False)


@dataclass(frozen=True)
class ProcessMark:
    """Identifies a process by pid and start time, because a later process may get the same pid."""

    pid: int
    started_ticks: int


@dataclass(frozen=True)
class Endpoint:
    """The addresses of the services that `headrace up` runs, and its processes. Stored in endpoint.json."""

    api_url: str
    rewarder_url: str
    generator_urls: tuple[str, ...]
    launcher: ProcessMark
    processes: Mapping[str, ProcessMark]
    is_ready: bool
    num_simulated: int = 0
    """Number of simulated generators; if it is not 0, all generators are simulated."""
    sessions_url: str = ""
    ca_file: Path | None = None
    """File with the CA of the services' certificates; None if it is a public CA, or the services do not use TLS."""
    end_patience_s: float = 75.0
    """Seconds that the launcher has to end the services."""

    def simulated_note(self) -> str:
        """Return a note that results of simulated generators are worthless."""
        return (
            f"{self.num_simulated} simulated generator{'s' if self.num_simulated > 1 else ''}: tokens are random, "
            "times are drawn, and a model trained on them is worthless"
        )


def choose_state_dir(named: str | None) -> Path:
    """Return the state directory: `--state-dir`, else HEADRACE_STATE_DIR, else ./.headrace."""
    return Path(os.path.expanduser(named or os.environ.get(STATE_DIR_VARIABLE) or DEFAULT_STATE_DIR)).absolute()


class StateDir:
    """Reads and writes the files of one state directory (keys, addresses, logs, runs)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.redis = path / "redis"
        self.runs = path / "runs"
        self.inputs = path / "inputs"
        self.functions = path / "functions"
        self.endpoint_file = path / "endpoint.json"
        self.redis_url_file = path / "redis_url"
        self.generators_file = path / "generators"
        self.api_key_file = self.key_file("api_key")
        self.api_keys_file = self.key_file("api_keys")

    def make(self) -> None:
        """Create missing directories and files, readable by their owner only.

        Raises:
            UserError: The directory cannot be created, or belongs to another user.
        """
        try:
            for directory in (self.path, self.path / "keys", self.logs, self.redis, self.runs, self.functions):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            # Keep keys and data out of a user's git repository without touching its own ignore file.
            (self.path / ".gitignore").write_text("*\n", encoding="utf-8")
            if not self.api_keys_file.exists():
                write_privately(self.api_keys_file, f"{HEADER}\n")
        except OSError as error:
            raise UserError(
                f"the state directory {self.path} cannot be used ({error.strerror}); name another one with --state-dir"
            ) from error

    def lock(self) -> IO[str]:
        """Return the open lock file. Until it is closed, no other `headrace up` can use this directory.

        Raises:
            UserError: Another `headrace up` has the lock, or the directory cannot be locked.
        """
        file = (self.path / "lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(
                f"headrace is already running on {self.path}; use it, end it with `headrace down`, "
                "or start another one with --state-dir OTHER"
            ) from None
        except OSError as error:
            file.close()
            raise UserError(
                f"{self.path} cannot be locked ({error.strerror}): name a directory on a local disk with --state-dir"
            ) from error
        return file

    def keys(self) -> Keys:
        """Return the keys, and create the missing ones."""
        return Keys(*(self._key(name) for name in ("api_key", "internal_key", "redis_password")))

    def key_file(self, name: str) -> Path:
        """Return the path of the file with this secret, such as ``api_key``."""
        return self.path / "keys" / name

    def _key(self, name: str) -> str:
        path = self.key_file(name)
        if not path.exists() or not path.read_text(encoding="utf-8").strip():
            write_privately(path, secrets.token_urlsafe(_KEY_BYTES) + "\n")
        return path.read_text(encoding="utf-8").strip()

    def write_endpoint(self, endpoint: Endpoint) -> None:
        """Write the addresses and processes of the services to endpoint.json."""
        body = {
            "api_url": endpoint.api_url,
            "rewarder_url": endpoint.rewarder_url,
            "sessions_url": endpoint.sessions_url,
            "generator_urls": list(endpoint.generator_urls),
            "ca_file": str(endpoint.ca_file) if endpoint.ca_file is not None else "",
            "num_simulated": endpoint.num_simulated,
            "is_ready": endpoint.is_ready,
            "end_patience_s": endpoint.end_patience_s,
            "launcher": _mark_to_json(endpoint.launcher),
            "processes": {name: _mark_to_json(mark) for name, mark in endpoint.processes.items()},
        }
        write_privately(self.endpoint_file, json.dumps(body, indent=2) + "\n")

    def endpoint(self) -> Endpoint | None:
        """Return the content of endpoint.json; None if the file does not exist.

        Raises:
            UserError: The file cannot be read or is not valid.
        """
        try:
            body = json.loads(self.endpoint_file.read_text(encoding="utf-8"))
            return Endpoint(
                api_url=str(body["api_url"]),
                rewarder_url=str(body["rewarder_url"]),
                generator_urls=tuple(str(url) for url in body["generator_urls"]),
                launcher=_mark_from_json(body["launcher"]),
                processes={str(name): _mark_from_json(mark) for name, mark in body["processes"].items()},
                is_ready=bool(body["is_ready"]),
                sessions_url=str(body.get("sessions_url", "")),
                ca_file=Path(body["ca_file"]) if body.get("ca_file") else None,
                num_simulated=int(body.get("num_simulated", 0)),
                end_patience_s=float(body.get("end_patience_s", Endpoint.end_patience_s)),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.endpoint_file} cannot be read ({error}); delete it") from error

    def write_redis_url(self, url: str) -> None:
        """Write the URL of the services' Redis, with its password."""
        write_privately(self.redis_url_file, url + "\n")

    def redis_url(self) -> str:
        """Return the URL of the services' Redis; empty if `headrace up` has not written one.

        Raises:
            UserError: The file cannot be read.
        """
        try:
            return self.redis_url_file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise UserError(f"{self.redis_url_file} cannot be read: {error.strerror}") from error

    def forget_endpoint(self) -> None:
        """Delete the files that exist only while the services run."""
        self.endpoint_file.unlink(missing_ok=True)
        self.redis_url_file.unlink(missing_ok=True)
        self.generators_file.unlink(missing_ok=True)

    def want_generators(self, count: int) -> None:
        """Write the wanted number of generators. `headrace up` reads it when it gets SIGUSR1."""
        write_privately(self.generators_file, f"{count}\n")

    def wanted_generators(self) -> int | None:
        """Return the number of generators that `headrace scale` asked for; None if `headrace scale` was not used."""
        try:
            return int(self.generators_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None


def write_privately(path: Path, text: str) -> None:
    """Replace a file atomically, even if the power fails. Only its owner can ever read it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _mark_to_json(mark: ProcessMark) -> list[int]:
    return [mark.pid, mark.started_ticks]


def _mark_from_json(raw: Any) -> ProcessMark:
    pid, started_ticks = raw
    return ProcessMark(int(pid), int(started_ticks))
