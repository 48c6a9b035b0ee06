"""Plain data as JSON, and back: what may pass between the judge and the code that it tests.

Scalars are themselves, everything else is a list of a tag and its content. What is no plain data stays where it is and
is given a number. Subclasses arrive as what they derive from, so that nothing of the code's own travels.
"""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast


def encode(value: Any, number_of: Callable[[Any], int]) -> Any:
    """Return what JSON can carry; ``number_of`` gives the number of what is no plain data."""

    def items(values: Any) -> list[Any]:
        return [encode(item, number_of) for item in values]

    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, list):
        return ["list", items(value)]
    if isinstance(value, tuple):
        return ["tuple", items(value)]
    if isinstance(value, set):
        return ["set", items(value)]
    if isinstance(value, frozenset):
        return ["frozenset", items(value)]
    if isinstance(value, dict):
        return ["dict", [items(pair) for pair in cast("dict[object, object]", value).items()]]
    if isinstance(value, Decimal):
        return ["decimal", str(value)]
    if isinstance(value, Fraction):
        return ["fraction", [hex(value.numerator), hex(value.denominator)]]
    return ["object", number_of(value)]


def decode(data: Any, object_of: Callable[[int], Any]) -> Any:
    """Return what was encoded; ``object_of`` stands in for what has only a number here.

    Raises:
        Exception: The other side sent what is nothing.
    """
    if not isinstance(data, list):
        return data
    tag, content = cast("tuple[str, Any]", data)
    if tag == "int":
        return int(content, 16)
    if tag == "complex":
        return complex(*content)
    if tag == "bytes":
        return bytes.fromhex(content)
    if tag == "decimal":
        return Decimal(content)
    if tag == "fraction":
        return Fraction(int(content[0], 16), int(content[1], 16))
    if tag == "object":
        return object_of(int(content))
    if tag == "dict":
        return {decode(key, object_of): decode(value, object_of) for key, value in content}
    kinds: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return kinds[tag](decode(item, object_of) for item in content)
