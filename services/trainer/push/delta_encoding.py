"""Encodes what changed in a parameter since it was last sent, in the format of shared/weights/weight_delta.py.

Pure, in numpy: one pass compares all elements, and everything more expensive runs only on the changed ones.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from shared.weights.weight_delta import GAP_ESCAPE, INTEGERS, STEP_ESCAPE, Delta, Positions, Values

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.signedinteger[Any]]


def encode_delta(before: Bytes, after: Bytes, *, item_bytes: int) -> bytes:
    """Return the shortest encoding that turns ``before`` into ``after``, bit for bit.

    Args:
        before: The receiver's current contents; one-dimensional, contiguous.
        after: The new contents, of the same length.
        item_bytes: Size of an element: 1, 2, 4 or 8.
    """
    old, new = before.view(INTEGERS[item_bytes]), after.view(INTEGERS[item_bytes])
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
    num_escapes = gaps // GAP_ESCAPE
    num_bytes = int(num_escapes.sum()) + gaps.size
    if num_bytes > max_bytes:
        return None
    written = np.full(num_bytes, GAP_ESCAPE, np.uint8)
    written[np.cumsum(num_escapes + 1) - 1] = gaps % GAP_ESCAPE
    return written.tobytes()


def _write_values(old: Integers, new: Integers) -> tuple[Values, bytes]:
    """Write the changed elements as steps if that is shorter, else as they are."""
    if new.itemsize > 1:
        steps = new - old  # wraps around, and adding it back wraps too
        is_near = (steps > STEP_ESCAPE) & (steps <= -STEP_ESCAPE - 1)
        far = new[~is_near]
        if steps.size + far.nbytes < new.nbytes:
            return Values.STEPS, np.where(is_near, steps, STEP_ESCAPE).astype(np.int8).tobytes() + far.tobytes()
    return Values.RAW, new.tobytes()
