"""Which key a command shows to a service, and where it has it from.

    --state-dir DIR                           the keys in it, whatever the environment says
    HEADRACE_API_KEY, HEADRACE_API_KEY_FILE   the key, or a file that holds it; the key itself comes first
    HEADRACE_STATE_DIR, ./.headrace           the keys that `headrace up` made

Keys are never options: a command line is public.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headrace.state_dir import StateDir
from shared.errors import UserError
from shared.secret_files import read_secret

KeyName = Literal["api_key", "internal_key"]
KEY_NAMES: tuple[KeyName, ...] = ("api_key", "internal_key")


@dataclass(frozen=True)
class KnownKey:
    """A key; empty if there is none.

    Args:
        key: To show.
        source: The variable or the file that it is from.
        is_of_environment: Whether it is from a variable, or a file that a variable names.
    """

    key: str = field(default="", repr=False)
    source: str = ""
    is_of_environment: bool = False


def key_of_environment(name: KeyName, environment: Mapping[str, str] = os.environ) -> KnownKey:
    """Return the key that a variable holds, or the file that another one names.

    Raises:
        UserError: The file holds no key.
    """
    variable = f"HEADRACE_{name.upper()}"
    if key := environment.get(variable, ""):
        return KnownKey(key, variable, is_of_environment=True)
    if not (file := environment.get(f"{variable}_FILE", "")):
        return KnownKey()
    return KnownKey(secret_of(file, f"{variable}_FILE"), f"{variable}_FILE ({file})", is_of_environment=True)


def key_of_local_service(
    name: KeyName, state: StateDir, *, is_named: bool, environment: Mapping[str, str] = os.environ
) -> KnownKey:
    """Return the key for what `headrace up` runs here.

    Args:
        name: Of the key.
        state: Where `headrace up` keeps its own.
        is_named: Whether an option names that directory, which then comes before the environment.
        environment: Holds variables.
    """
    found = KnownKey() if is_named else key_of_environment(name, environment)
    return found if found.key else KnownKey(getattr(state.keys(), name), str(state.key_file(name)))


def secret_of(file: str, variable: str) -> str:
    """Return the secret in a file.

    Raises:
        UserError: There is none in it; the variable is named.
    """
    try:
        return read_secret(Path(file), variable=variable)
    except ValueError as error:
        raise UserError(str(error)) from error
