"""The exception for refused arguments of ``GRPOTrainer``, and messages of the run API in terms of these arguments."""

import re
from dataclasses import fields

from shared.errors import UserError
from shared.run_options.grpo_config import GRPOConfig

_SETTING = re.compile(r"\bset (?P<name>\w+): (?P<value>true|false)\b")
"""Advice in messages of the run API, for run files."""


class ArgumentError(UserError, ValueError):
    """An argument is wrong or not supported. The message says what to do instead. It is a ValueError, as in TRL."""


def in_python(message: str) -> str:
    """Reword advice for run files (``set NAME: true``) in a message of the run API as Python (``set NAME=True``)."""
    return _SETTING.sub(_as_argument, message)


def _as_argument(setting: re.Match[str]) -> str:
    name, value = setting["name"], setting["value"].capitalize()
    is_option = name in (option.name for option in fields(GRPOConfig))
    return f"set {name}={value}" if is_option else f'set run_options={{"{name}": {value}}}'
