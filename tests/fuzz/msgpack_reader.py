"""Reads msgpack into dicts and lists without the msgpack library, so that a message can be checked independently.

Text that is not UTF-8 is decoded as Python decodes file names: it may be in unknown fields, which are skipped.
"""

import datetime
import struct
from typing import Any

_SIZES = {0xC4: "B", 0xC5: ">H", 0xC6: ">I", 0xD9: "B", 0xDA: ">H", 0xDB: ">I",
          0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}  # fmt: skip
_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: "B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
            0xD0: "b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}  # fmt: skip
_EXTENSIONS = {0xC7: "B", 0xC8: ">H", 0xC9: ">I"}
_TIMESTAMP = 255


class Extension:
    """A msgpack extension value."""


def read(data: bytes) -> Any:
    """Return the content of the bytes; raises ValueError or struct.error if it ends early or bytes are left over."""
    value, end = _read(data, 0)
    if end != len(data):
        raise ValueError("there is more")
    return value


def _read(data: bytes, at: int) -> tuple[Any, int]:
    head, at = data[at], at + 1
    if head < 0x80 or head >= 0xE0:
        return (head if head < 0x80 else head - 256), at
    if head in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[head], at
    if head in _NUMBERS:
        return _number(_NUMBERS[head], data, at)
    if head < 0x90:
        return _table(head & 0x0F, data, at)
    if head < 0xA0:
        return _list(head & 0x0F, data, at)
    if head < 0xC0:
        return _text(head & 0x1F, data, at)
    if head >= 0xD4 and head <= 0xD8:
        return _extension(1 << (head - 0xD4), data, at)
    if head in _EXTENSIONS:
        size, at = _number(_EXTENSIONS[head], data, at)
        return _extension(size, data, at)
    size, at = _number(_SIZES[head], data, at)
    if head <= 0xC6:
        return data[at : at + size], at + size
    if head <= 0xDB:
        return _text(size, data, at)
    return _list(size, data, at) if head <= 0xDD else _table(size, data, at)


def _number(form: str, data: bytes, at: int) -> tuple[Any, int]:
    return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)


def _text(size: int, data: bytes, at: int) -> tuple[str, int]:
    return data[at : at + size].decode(errors="surrogateescape"), at + size


def _list(size: int, data: bytes, at: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    for _ in range(size):
        value, at = _read(data, at)
        found.append(value)
    return found, at


def _table(size: int, data: bytes, at: int) -> tuple[dict[Any, Any], int]:
    found: dict[Any, Any] = {}
    for _ in range(size):
        key, at = _read(data, at)
        value, at = _read(data, at)
        found[key if isinstance(key, str | int | float | bytes | None) else repr(key)] = value
    return found, at


def _extension(size: int, data: bytes, at: int) -> tuple[Any, int]:
    kind = data[at]
    value = datetime.datetime.now(datetime.UTC) if kind == _TIMESTAMP else Extension()
    return value, at + 1 + size
