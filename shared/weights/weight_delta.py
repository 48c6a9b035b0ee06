"""The changes of one parameter since the last push, as bytes on the wire. Lossless and self-describing.

    header | positions of the changed elements | their new bits | CRC-32 of all of it

After an optimizer step with a small learning rate most elements of a bfloat16 parameter keep all their bits, and most
of the others move to a neighbouring number. Elements are compared and written as integers of their size, so that -0.0,
NaN payloads and dtypes that numpy does not know are kept exactly.

    positions   none     nothing changed, or every element is sent
                gaps     elements between one change and the next, one byte each; 255 means "255 more, and go on"
                bitmap   one bit for each element, least significant first
    values      whole    every element of the parameter, as it is
                raw      every changed element, as it is
                steps    new minus old as integers, one byte each; -128 means "see the elements that follow, as is"

Integers are little-endian. Encoder: sent_weights.py of the trainer. Decoder: staged_weights.py of the generator.
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np

MAGIC: Final = b"HRD1"
GAP_ESCAPE: Final = 255
STEP_ESCAPE: Final = -128
INTEGERS: Final[dict[int, np.dtype[np.signedinteger[Any]]]] = {
    1: np.dtype("i1"),
    2: np.dtype("<i2"),
    4: np.dtype("<i4"),
    8: np.dtype("<i8"),
}
"""Element size in bytes to the integer type in which elements are compared."""

_HEADER = struct.Struct("<4sBBBxQQQ")
_CRC = struct.Struct("<I")


class Positions(IntEnum):
    """How positions are written."""

    NONE = 0
    GAPS = 1
    BITMAP = 2


class Values(IntEnum):
    """How values are written."""

    WHOLE = 0
    RAW = 1
    STEPS = 2


@dataclass(frozen=True)
class Delta:
    """One parameter's delta, split into its parts, which are not decoded yet.

    Attributes:
        num_elements: Number of elements of the parameter.
        num_changed: Number of elements that changed; all for ``Values.WHOLE``.
    """

    positions_as: Positions
    values_as: Values
    item_bytes: int
    num_elements: int
    num_changed: int
    positions: bytes
    values: bytes

    def to_bytes(self) -> bytes:
        """Return the delta as it travels."""
        header = _HEADER.pack(
            MAGIC,
            self.positions_as,
            self.values_as,
            self.item_bytes,
            self.num_elements,
            self.num_changed,
            len(self.positions),
        )
        body = b"".join((header, self.positions, self.values))
        return body + _CRC.pack(zlib.crc32(body))


def parse_delta(data: bytes) -> Delta:
    """Split a delta into its parts.

    Raises:
        ValueError: The bytes are cut off, damaged, or not a delta at all. The message is a sentence.
    """
    if len(data) < _HEADER.size + _CRC.size:
        raise ValueError(f"a delta of {len(data)} bytes is cut off")
    magic, positions_as, values_as, item_bytes, num_elements, num_changed, positions_end = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ValueError("these bytes are not a delta")
    (crc,) = _CRC.unpack_from(data, len(data) - _CRC.size)
    if zlib.crc32(memoryview(data)[: -_CRC.size]) != crc:
        raise ValueError("a delta was damaged on its way: its CRC is wrong")
    body = data[_HEADER.size : -_CRC.size]
    if positions_end > len(body) or item_bytes not in INTEGERS or num_changed > num_elements:
        raise ValueError("the header of a delta contradicts itself")
    return Delta(
        positions_as=Positions(positions_as),
        values_as=Values(values_as),
        item_bytes=item_bytes,
        num_elements=num_elements,
        num_changed=num_changed,
        positions=body[:positions_end],
        values=body[positions_end:],
    )
