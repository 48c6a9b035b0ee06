"""Describes a wrong value in the terms of a run file, because the library that checks it uses Python's terms.

    Input should be a valid integer   -->   must be a whole number, and is text; write it without quotes

Only the kind of a value is shown, because the value may be large or secret.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import ErrorDetails

_WANTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "string_unicode": "text that is valid Unicode",
    "list_type": "a list",
    "dict_type": "a table of names and values",
    "model_type": "a table of settings",
    "model_attributes_type": "a table of settings",
}
_BOUND: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than": lambda limits: f"greater than {limits['gt']:g}",
    "greater_than_equal": lambda limits: f"at least {limits['ge']:g}",
    "less_than": lambda limits: f"less than {limits['lt']:g}",
    "less_than_equal": lambda limits: f"at most {limits['le']:g}",
    "string_too_short": lambda limits: "text that is not empty" if limits["min_length"] == 1 else _at_least(limits),
    "string_too_long": lambda limits: f"text of at most {limits['max_length']} characters",
    "too_short": lambda limits: f"a list of at least {_items(limits['min_length'])}",
    "too_long": lambda limits: f"a list of at most {_items(limits['max_length'])}",
    "string_pattern_mismatch": lambda limits: _form(str(limits["pattern"])),
    "literal_error": lambda limits: _one_of(str(limits["expected"]).replace("'", "")),
}


def what_is_wrong(items: Sequence[ErrorDetails]) -> str:
    """Return why a value is refused, as a sentence without its subject. It names every kind of value that is allowed.

    Args:
        items: The errors of one value. Several errors are alternatives, none of which fits.
    """
    if items[0]["type"] == "value_error":
        return items[0]["msg"].removeprefix("Value error, ")
    if items[0]["type"] == "missing":
        return "is required"
    wanted = list(dict.fromkeys(_wanted(item) for item in items))
    if {"a number", "a finite number"} & set(wanted):
        wanted = [kind for kind in wanted if kind != "a whole number"]
    sentence = f"must be {' or '.join(wanted)}"
    return sentence + _but_is(items[0]["input"], wanted) if any(item["type"] in _WANTED for item in items) else sentence


def _wanted(item: ErrorDetails) -> str:
    kind = item["type"]
    if kind in _BOUND:
        return _BOUND[kind](item.get("ctx", {}))
    return _WANTED.get(kind) or f"something else ({item['msg']})"


def _but_is(value: object, wanted: Iterable[str]) -> str:
    """Return a phrase with the type of the given value, and a hint if only its spelling is wrong."""
    if value is None:
        return ", and is empty"
    if isinstance(value, str):
        return ", and is text" + ("; write it without quotes" if _reads_as(value, wanted) else "")
    if isinstance(value, list | tuple):
        return ", and is a list"
    if isinstance(value, dict):
        return ", and is a table"
    if isinstance(value, bool | int | float):
        return _but_is_scalar(value, wanted)
    return ""


def _but_is_scalar(value: bool | float, wanted: Iterable[str]) -> str:
    kind = "true or false" if isinstance(value, bool) else "a number"
    if "text" in wanted:
        return f", and is {kind}; put it in quotes"
    if "a whole number" in wanted and isinstance(value, float):
        return ", and has a decimal point"
    if "a finite number" in wanted:
        return ""
    return ", and is too large to be one" if kind in wanted else f", and is {kind}"


def _reads_as(text: str, wanted: Iterable[str]) -> bool:
    """Return whether a text would be a value of a wanted type if it were written without quotes."""
    if "true or false" in wanted:
        return text.lower() in ("true", "false")
    try:
        number = float(text)
    except ValueError:
        return False
    return "a number" in wanted or ("a whole number" in wanted and number.is_integer())


def _at_least(limits: Mapping[str, Any]) -> str:
    return f"text of at least {limits['min_length']} characters"


def _one_of(names: str) -> str:
    return f"one of {names}" if " or " in names else names


def _form(pattern: str) -> str:
    if pattern.strip("^$") == "[0-9a-f]{64}":
        return "text of 64 digits and letters from a to f, as sha256sum prints it"
    return f"text of the form {pattern}"


def _items(count: int) -> str:
    return f"{count} item" if count == 1 else f"{count} items"
