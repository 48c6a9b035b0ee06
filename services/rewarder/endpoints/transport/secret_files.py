"""Reads secrets by name: one file per secret, in a directory that Kubernetes or Docker Compose mounts.

    HEADRACE_REWARD_SECRETS_DIR/judge-key          holds the secret called judge-key
    HEADRACE_REWARD_SECRETS_DIR/judge-key.hosts    optional: hosts it may be sent to, HOST or HOST:PORT, one a line

A specification names secrets and never holds one. Each request reads its secrets again, so a rotated secret is used at
once. No listing, log or error shows a secret, and Redis does not hold one. The ``.hosts`` file protects a secret when
several people can register endpoints: without it, each person can have the secret sent to a server of their choice.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from services.rewarder.endpoints.transport.outbound_rules import AllowedHost, parse_hosts
from shared.errors import UserError

SECRET_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
REDACTED = "[secret]"
_MAX_SECRET_BYTES = 8192
_MIN_SECRET_CHARACTERS = 8
"""A shorter secret could be part of ordinary text, so it could not be redacted reliably."""
_SENDABLE = re.compile(r"[\x20-\x7e]+")


class SecretError(UserError):
    """A secret cannot be used. The message has its name, never its value."""


class SecretFiles:
    """The secrets in one directory. Without a directory, no secret can be read."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def read(self, name: str, *, host: str, port: int) -> str:
        """Return the secret ``name``, to be sent to ``host`` at ``port``.

        Raises:
            SecretError: The secret cannot be read, may not be sent there, or does not fit into a header.
        """
        if self._directory is None:
            raise SecretError(
                f"secret '{name}' cannot be read: HEADRACE_REWARD_SECRETS_DIR of the rewarder is not set; point it at "
                "a directory with one file per secret"
            )
        if not re.fullmatch(SECRET_NAME, name):
            raise SecretError("a secret is named with letters, digits, '.', '_' and '-'")
        path = self._directory / name
        try:
            with path.open("rb") as file:  # blocks the event loop only briefly: a small local file, often in memory
                data = file.read(_MAX_SECRET_BYTES + 1)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise SecretError(
                f"there is no secret '{name}': put it into a file of that name in HEADRACE_REWARD_SECRETS_DIR of the "
                "rewarder"
            ) from error
        except OSError as error:
            raise SecretError(f"secret '{name}' cannot be read: {error.strerror}") from error
        if len(data) > _MAX_SECRET_BYTES:
            raise SecretError(f"secret '{name}' has more than {_MAX_SECRET_BYTES} bytes")
        text = data.decode("ascii", "replace").strip("\r\n \t")
        if not _SENDABLE.fullmatch(text) or len(text) < _MIN_SECRET_CHARACTERS:
            raise SecretError(
                f"secret '{name}' must be one line of at least {_MIN_SECRET_CHARACTERS} printable ASCII characters"
            )
        hosts = _hosts(self._directory / f"{name}.hosts")
        if hosts is not None and not any(allowed.opens(host, port) for allowed in hosts):
            raise SecretError(
                f"secret '{name}' may not be sent to {host} at port {port}: {name}.hosts does not list it"
            )
        return text


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Return ``text`` with the secrets replaced, also where they are escaped as in JSON."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED).replace(json.dumps(secret)[1:-1], REDACTED)
    return text


def _hosts(path: Path) -> tuple[AllowedHost, ...] | None:
    try:
        return parse_hosts(",".join(path.read_text(encoding="ascii").splitlines()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        raise SecretError(f"the file {path.name} cannot be read, or has something that is not a host name") from error
