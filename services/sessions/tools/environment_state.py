"""Reads the public attributes of an environment as JSON, so that reward functions, in another service, can use them.

attributes, properties --as JSON--> attributes: the shortest first, until there is no room
                                    left_out: the reasons why the rest is missing
"""

import itertools
import json
from typing import Any

import msgspec

from shared.message_invariants import is_data
from shared.user_code.error_text import describe, encodable

MAX_STATE_CHARS = 1 << 16
"""Most characters of all attributes together, as JSON."""
_MAX_LEFT_OUT = 64
_TOO_LONG = f"it has more than {MAX_STATE_CHARS} characters as JSON, which all attributes together may have"


class EnvironmentState(msgspec.Struct, frozen=True):
    """The public attributes of an environment that JSON can express, and the reasons why others are left out."""

    attributes: dict[str, Any]
    left_out: dict[str, str]


def state_of(environment: object) -> str:
    """Return a JSON text with an environment's public attributes, and with the reasons why some are left out.

    Runs in the process of an environment in Python, and in the service for the state of an OpenEnv server.
    """
    texts: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for name in dir(environment):
        if name.startswith("_"):
            continue
        try:
            value = getattr(environment, name)
            if not callable(value):
                texts[name] = _as_json(value)
        except _TooLongError as error:
            left_out[name] = str(error)
        except BaseException as error:  # noqa: BLE001  user code: a property may do anything
            left_out[name] = describe(error)
    num_left, attributes = MAX_STATE_CHARS, dict[str, msgspec.Raw]()
    for name, text in sorted(texts.items(), key=lambda item: len(item[1])):
        num_left -= len(text)
        if num_left < 0:
            left_out[name] = (
                f"it has {len(text)} characters as JSON, and all attributes together may have {MAX_STATE_CHARS}"
            )
        else:
            attributes[encodable(name)] = msgspec.Raw(text.encode())
    reasons = {encodable(name): why for name, why in itertools.islice(left_out.items(), _MAX_LEFT_OUT)}
    return msgspec.json.encode({"attributes": attributes, "left_out": reasons}).decode()


def read_state(text: str) -> EnvironmentState:
    """Return the state that ``state_of`` wrote. Raises ValueError if the text is not such a state."""
    try:
        return msgspec.json.decode(text, type=EnvironmentState)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


class _TooLongError(Exception):
    """An attribute has too many characters as JSON. It is raised before all of the attribute is encoded."""


def _as_json(value: object) -> str:
    if isinstance(value, str) and len(value) > MAX_STATE_CHARS:
        raise _TooLongError(_TOO_LONG)
    text = ""
    for part in _encoder.iterencode(value):
        text += part
        if len(text) > MAX_STATE_CHARS:
            raise _TooLongError(_TOO_LONG)
    plain = msgspec.json.decode(text)
    msgspec.msgpack.encode(plain)  # it travels so
    if not is_data({"": plain}):
        raise ValueError("it is nested too deeply")
    return text


def _as_lists(value: Any) -> object:
    """Return an array or scalar of numpy or torch as Python numbers in lists, for the JSON encoder.

    Raises:
        TypeError: JSON does not have the value's type.
        _TooLongError: The array has too many values.
    """
    if not hasattr(value, "tolist"):
        raise TypeError(f"JSON does not have the type {type(value).__name__}")
    num_values: Any = value.numel() if hasattr(value, "numel") else getattr(value, "size", 0)
    if isinstance(num_values, int) and num_values > MAX_STATE_CHARS:
        raise _TooLongError(
            f"it has {num_values} values, and all attributes together may have {MAX_STATE_CHARS} characters as JSON"
        )
    return value.tolist()


_encoder = json.JSONEncoder(default=_as_lists, allow_nan=False)
