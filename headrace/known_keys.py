"""Which keys a command shows to a service. They come from the same place as its address, so that no key goes elsewhere.

    --url, HEADRACE_URL             HEADRACE_API_KEY, or the file that HEADRACE_API_KEY_FILE names; the key comes first
    --state-dir, HEADRACE_STATE_DIR,
    ./.headrace                     the keys that `headrace up` made there, whatever the environment says

Keys are never options: a command line is public.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shared.errors import UserError
from shared.secret_files import read_secret

KeyName = Literal["api_key", "internal_key"]


@dataclass(frozen=True)
class KnownKey:
    """A key; empty if there is none.

    Args:
        key: To show.
        source: The variable, or the file that one names.
    """

    key: str = field(default="", repr=False)
    source: str = ""


def key_of_environment(name: KeyName, environment: Mapping[str, str] = os.environ) -> KnownKey:
    """Return the key that a variable holds, or the file that another one names.

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
    """Yield the variables that name a key, where another one was used; files are not looked into."""
    variable = _variable(name)
    if environment.get(variable, "") not in ("", used):
        yield variable
    if environment.get(f"{variable}_FILE"):
        yield f"{variable}_FILE"


def secret_of(file: str, variable: str) -> str:
    """Return the secret in a file.

    Raises:
        UserError: There is none in it; the variable is named.
    """
    try:
        return read_secret(Path(file), variable=variable, otherwise="mend the path, or leave the variable out")
    except ValueError as error:
        raise UserError(str(error)) from error


def _variable(name: KeyName) -> str:
    return f"HEADRACE_{name.upper()}"
