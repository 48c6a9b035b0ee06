"""Finds the key for a service. It comes from the same place as the service's address, so no key is sent elsewhere.

    --url, HEADRACE_URL             HEADRACE_API_KEY; if that is empty, the file that HEADRACE_API_KEY_FILE names
    --state-dir, HEADRACE_STATE_DIR,
    ./.headrace                     the keys that `headrace up` made there; the environment is ignored

A key is never a command-line option, because command lines are public.
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
        source: The variable that holds the key, or the ``_FILE`` variable and its path. For messages.
    """

    key: str = field(default="", repr=False)
    source: str = ""


def key_of_environment(name: KeyName, environment: Mapping[str, str] = os.environ) -> KnownKey:
    """Return the key in HEADRACE_API_KEY or HEADRACE_INTERNAL_KEY, or else the one in the file that ..._FILE names.

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
    """Yield the environment variables that give another key than ``used``. Files are not read, and count as another."""
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
