"""Secrets by name: one file a secret, in a directory that Kubernetes or compose mounts.

    HEADRACE_REWARD_SECRETS_DIR/judge-key          the secret
    HEADRACE_REWARD_SECRETS_DIR/judge-key.hosts    optional: the hosts it may be sent to, one a line

A specification names secrets and never holds one. They are read anew for every request, so that a rotated one is used
at once, and are in no listing, log, error or Redis. The file with hosts is for an operator whose API key has many
hands: without it, whoever can register an endpoint can have the secret sent to it.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from services.rewarder.endpoints.outbound_rules import AllowedHost, parse_hosts
from shared.errors import UserError

SECRET_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
REDACTED = "[secret]"
_MAX_SECRET_BYTES = 8192
_MIN_SECRET_CHARACTERS = 8
"""A shorter one could not be told from ordinary text, and so not be kept out of what is shown."""
_SENDABLE = re.compile(r"[\x20-\x7e]+")


class SecretError(UserError):
    """A secret cannot be used; the message names it and never holds it."""


class SecretFiles:
    """The secrets of one directory; without a directory there are none."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def read(self, name: str, *, host: str) -> str:
        """Return the secret ``name``, which is going to ``host``.

        Raises:
            SecretError: There is none, it may not go there, or no header can carry it.
        """
        if self._directory is None:
            raise SecretError(
                f"secret '{name}' cannot be read: HEADRACE_REWARD_SECRETS_DIR of the rewarder is not set; point it at "
                "a directory with one file a secret"
            )
        if not re.fullmatch(SECRET_NAME, name):
            raise SecretError("a secret is named with letters, digits, '.', '_' and '-'")
        path = self._directory / name
        try:
            with path.open("rb") as file:  # small and local, in memory where an orchestrator mounts it
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
        if hosts is not None and not any(allowed.covers(host) for allowed in hosts):
            raise SecretError(
                f"secret '{name}' may not be sent to {host}: the file {name}.hosts does not name that host"
            )
        return text


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Return ``text`` without the secrets, which a service may have sent back."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED).replace(json.dumps(secret)[1:-1], REDACTED)
    return text


def _hosts(path: Path) -> tuple[AllowedHost, ...] | None:
    try:
        return parse_hosts(",".join(path.read_text(encoding="ascii").splitlines()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        raise SecretError(f"the file {path.name} cannot be read, or holds what is no host name") from error
