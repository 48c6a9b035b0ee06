"""Finds the key for a service in the same place as the service's address, so that no key is sent to another service.

    --url, HEADRACE_URL                           --> the key in HEADRACE_API_KEY or in the file HEADRACE_API_KEY_FILE
    --state-dir, HEADRACE_STATE_DIR, ./.headrace  --> the keys that `headrace up` made there, whatever the environment

A key is never a command-line option, because every user of a machine can read command lines.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shared.errors import UserError
from shared.service.secret_files import read_secret

KeyName = Literal["api_key", "internal_key"]


@dataclass(frozen=True)
class KnownKey:
    """A key and where it was found; both are empty if it was not found.

    Args:
        key: The secret.
        source: The variable that holds the key, or the ``_FILE`` variable with the file's path. For messages.
    """

    key: str = field(default="", repr=False)
    source: str = ""


def key_of_environment(name: KeyName, environment: Mapping[str, str] = os.environ) -> KnownKey:
    """Return the key in HEADRACE_API_KEY (or ..._INTERNAL_KEY), or else in the file that ..._FILE names; empty if none.

    Raises:
        UserError: The file holds no key.
    """
    variable = _variable(name)
    if key := environment.get(variable, ""):
        return KnownKey(key, variable)
    if not (file := environment.get(f"{variable}_FILE", "")):
        return KnownKey()
    return KnownKey(secret_of(file, f"{variable}_FILE"), f"{variable}_FILE ({file})")


def unused_variables(name: KeyName, used: str, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield the environment variables with another key than ``used``. ``_FILE`` variables count without being read."""
    variable = _variable(name)
    if environment.get(variable, "") not in ("", used):
        yield variable
    if environment.get(f"{variable}_FILE"):
        yield f"{variable}_FILE"


def secret_of(file: str, variable: str) -> str:
    """Return the secret in the file that an environment variable names.

    Raises:
        UserError: The file holds no secret; the message names the variable.
    """
    try:
        return read_secret(Path(file), variable=variable, otherwise="correct the path, or unset the variable")
    except ValueError as error:
        raise UserError(str(error)) from error


def _variable(name: KeyName) -> str:
    return f"HEADRACE_{name.upper()}"
