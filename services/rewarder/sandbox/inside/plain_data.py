"""Encodes plain data as JSON and decodes it, for the messages between the judge and the code that it tests.

None, booleans, strings and floats are sent as they are. Other values are sent as a list of a tag and the content.
Objects that are not plain data stay in their process, and only a number is sent for them. An instance of a subclass
arrives as its base type, so that no type of the tested code reaches the judge.
"""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast


def encode(value: Any, number_of: Callable[[Any], int]) -> Any:
    """Return ``value`` in a form that JSON can hold.

    ``number_of`` returns the number to send for an object that is not plain data.
    """

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
    """Return the value that ``encode`` has encoded.

    ``object_of`` returns the object, or a proxy for it, that belongs to a number.

    Raises:
        Exception: The data is not valid.
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
