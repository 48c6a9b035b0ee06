"""Encodes and decodes the changes of one parameter since the last push. Lossless and self-describing.

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

Integers are little-endian. sent_weights.py of the trainer encodes, and staged_weights.py of the generator decodes.
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.signedinteger[Any]]

_MAGIC: Final = b"HRD1"
_GAP_ESCAPE: Final = 255
_STEP_ESCAPE: Final = -128
_INTEGERS: Final[dict[int, np.dtype[np.signedinteger[Any]]]] = {
    1: np.dtype("i1"),
    2: np.dtype("<i2"),
    4: np.dtype("<i4"),
    8: np.dtype("<i8"),
}
"""Element size in bytes to the integer type in which elements are compared."""

_HEADER = struct.Struct("<4sBBBxQQQ")
_CRC = struct.Struct("<I")


class Positions(IntEnum):
    """The encodings of the changed elements' positions in a delta."""

    NONE = 0
    GAPS = 1
    BITMAP = 2


class Values(IntEnum):
    """The encodings of the changed elements' new values in a delta."""

    WHOLE = 0
    RAW = 1
    STEPS = 2


@dataclass(frozen=True)
class Delta:
    """One parameter's delta, split into its parts. Reading a part raises ValueError if it contradicts the header.

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
        """Return the delta's bytes on the wire: header, positions, values, CRC-32."""
        header = _HEADER.pack(
            _MAGIC,
            self.positions_as,
            self.values_as,
            self.item_bytes,
            self.num_elements,
            self.num_changed,
            len(self.positions),
        )
        body = b"".join((header, self.positions, self.values))
        return body + _CRC.pack(zlib.crc32(body))

    def read_positions(self) -> npt.NDArray[np.int64] | npt.NDArray[np.bool_]:
        """Return an index of the changed elements: their ascending positions, or a boolean for every element."""
        written = np.frombuffer(self.positions, np.uint8)
        if self.positions_as is Positions.BITMAP:
            if written.size != (self.num_elements + 7) // 8:
                raise ValueError(f"a bitmap of {written.size} bytes was received for {self.num_elements} elements")
            bits = np.unpackbits(written, bitorder="little").view(np.bool_)
            num_found = int(np.count_nonzero(bits[: self.num_elements]))
            if num_found != self.num_changed or bits[self.num_elements :].any():
                raise ValueError(f"a delta with {self.num_changed} changes has {num_found} bits set")
            return bits[: self.num_elements]
        ends = np.flatnonzero(written != _GAP_ESCAPE)
        if written.size and (not ends.size or ends[-1] != written.size - 1):
            raise ValueError("the last position of a delta is cut off")
        found = np.cumsum(written, dtype=np.int64)[ends] + np.arange(ends.size)
        if found.size != self.num_changed:
            raise ValueError(f"a delta with {self.num_changed} changes has {found.size} positions")
        if found.size and found[-1] >= self.num_elements:
            raise ValueError(f"a delta changes element {found[-1]} of {self.num_elements}")
        return found

    def read_raw(self) -> Integers:
        """Return the new values of the changed elements, for a delta with `Values.WHOLE` or `Values.RAW`."""
        return self._elements(self.values, self.num_changed)

    def read_steps(self, old: Integers) -> Integers:
        """Return the new values of the changed elements from their ``old`` ones, for a delta with `Values.STEPS`."""
        if len(self.values) < self.num_changed:
            raise ValueError(f"a delta has {len(self.values)} bytes of steps for {self.num_changed} elements")
        steps = np.frombuffer(self.values, np.int8, count=self.num_changed)
        is_far = steps == _STEP_ESCAPE
        values: Integers = old + steps.astype(old.dtype)  # wraps around, as the subtraction did
        values[is_far] = self._elements(self.values[self.num_changed :], int(is_far.sum()))
        return values

    def _elements(self, data: bytes, count: int) -> Integers:
        if len(data) != count * self.item_bytes:
            raise ValueError(f"a delta has {len(data)} bytes of values for {count} elements of {self.item_bytes}")
        return np.frombuffer(bytearray(data), _INTEGERS[self.item_bytes])


def parse_delta(data: bytes) -> Delta:
    """Decode the bytes of a delta into its parts, and check its CRC-32 and its header.

    Raises:
        ValueError: The bytes are cut off, damaged, or not a delta at all. The message is a sentence.
    """
    if len(data) < _HEADER.size + _CRC.size:
        raise ValueError(f"a delta of {len(data)} bytes is cut off")
    magic, positions_as, values_as, item_bytes, num_elements, num_changed, positions_end = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("these bytes are not a delta")
    (crc,) = _CRC.unpack_from(data, len(data) - _CRC.size)
    if zlib.crc32(memoryview(data)[: -_CRC.size]) != crc:
        raise ValueError("a delta was damaged on its way: its CRC is wrong")
    body = data[_HEADER.size : -_CRC.size]
    is_strange = positions_end > len(body) or item_bytes not in _INTEGERS or num_changed > num_elements
    if is_strange or (values_as == Values.WHOLE and (positions_end or num_changed < num_elements)):
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


def encode_delta(before: Bytes, after: Bytes, *, item_bytes: int) -> bytes:
    """Return the shortest encoding that turns ``before`` into ``after``, bit for bit.

    Args:
        before: The receiver's current contents; one-dimensional, contiguous.
        after: The new contents, of the same length.
        item_bytes: Size of an element: 1, 2, 4 or 8.
    """
    old, new = before.view(_INTEGERS[item_bytes]), after.view(_INTEGERS[item_bytes])
    changed = old != new
    num_changed = int(np.count_nonzero(changed))
    if not num_changed:
        return Delta(Positions.NONE, Values.RAW, item_bytes, new.size, 0, b"", b"").to_bytes()
    bitmap_bytes = (new.size + 7) // 8
    # An array of positions takes 8 bytes each. For many changes that is several times the parameter, so only few are
    # listed.
    where = np.flatnonzero(changed) if num_changed <= bitmap_bytes else changed
    gaps = None if where is changed else _write_gaps(where, max_bytes=bitmap_bytes)
    positions_as = Positions.BITMAP if gaps is None else Positions.GAPS
    positions = np.packbits(changed, bitorder="little").tobytes() if gaps is None else gaps
    values_as, values = _write_values(old[where], new[where])
    if len(positions) + len(values) >= new.nbytes:
        return Delta(Positions.NONE, Values.WHOLE, item_bytes, new.size, new.size, b"", new.tobytes()).to_bytes()
    return Delta(positions_as, values_as, item_bytes, new.size, num_changed, positions, values).to_bytes()


def _write_gaps(positions: npt.NDArray[np.intp], *, max_bytes: int) -> bytes | None:
    """Return the gaps before the changed elements, or None if they take more than ``max_bytes``."""
    gaps = np.diff(positions, prepend=-1) - 1
    num_escapes = gaps // _GAP_ESCAPE
    num_bytes = int(num_escapes.sum()) + gaps.size
    if num_bytes > max_bytes:
        return None
    written = np.full(num_bytes, _GAP_ESCAPE, np.uint8)
    written[np.cumsum(num_escapes + 1) - 1] = gaps % _GAP_ESCAPE
    return written.tobytes()


def _write_values(old: Integers, new: Integers) -> tuple[Values, bytes]:
    """Write the changed elements as steps if that is shorter, else as they are."""
    if new.itemsize > 1:
        steps = new - old  # wraps around, and adding it back wraps too
        is_near = (steps > _STEP_ESCAPE) & (steps <= -_STEP_ESCAPE - 1)
        far = new[~is_near]
        if steps.size + far.nbytes < new.nbytes:
            return Values.STEPS, np.where(is_near, steps, _STEP_ESCAPE).astype(np.int8).tobytes() + far.tobytes()
    return Values.RAW, new.tobytes()
