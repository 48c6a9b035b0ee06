"""Applies a weight delta to this replica's copy of a parameter; shared/weights/weight_delta.py defines the format.

Everything is checked before the first element is written, so a refused delta changes nothing.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared.weights.weight_delta import GAP_ESCAPE, INTEGERS, STEP_ESCAPE, Delta, Positions, Values, parse_delta

Integers = npt.NDArray[np.signedinteger[Any]]

_TORCH_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def apply_delta(target: torch.Tensor, data: bytes) -> None:
    """Change ``target`` in place to the sender's values.

    Args:
        target: The values that the delta starts from; contiguous, on any device.
        data: One delta.

    Raises:
        ValueError: The delta is damaged, or is for a parameter of another size; ``target`` is unchanged.
    """
    delta = parse_delta(data)
    if (delta.num_elements, delta.item_bytes) != (target.numel(), target.element_size()):
        raise ValueError(
            f"a delta for {delta.num_elements} elements of {delta.item_bytes} bytes was received for a parameter "
            f"with {target.numel()} elements of {target.element_size()} bytes"
        )
    elements = target.detach().view(-1).view(_TORCH_INTEGERS[delta.item_bytes])
    if delta.values_as is Values.WHOLE:
        whole = _read_raw(delta, delta.values, delta.num_elements)
        if delta.num_changed != delta.num_elements or delta.positions:
            raise ValueError("the header of a delta contradicts itself")
        elements.copy_(torch.from_numpy(whole))
        return
    positions = torch.from_numpy(_read_positions(delta)).to(target.device)
    if delta.values_as is Values.RAW:
        values = _read_raw(delta, delta.values, delta.num_changed)
    else:
        values = _read_steps(delta, elements[positions].cpu().numpy())
    elements[positions] = torch.from_numpy(values).to(target.device)


def _read_positions(delta: Delta) -> npt.NDArray[np.int64] | npt.NDArray[np.bool_]:
    """Return an index of the changed elements: their positions in ascending order, or a boolean for every element."""
    written = np.frombuffer(delta.positions, np.uint8)
    if delta.positions_as is Positions.BITMAP:
        if written.size != (delta.num_elements + 7) // 8:
            raise ValueError(f"a bitmap of {written.size} bytes was received for {delta.num_elements} elements")
        bits = np.unpackbits(written, bitorder="little").view(np.bool_)
        num_found = int(np.count_nonzero(bits[: delta.num_elements]))
        if num_found != delta.num_changed or bits[delta.num_elements :].any():
            raise ValueError(f"a delta with {delta.num_changed} changes has {num_found} bits set")
        return bits[: delta.num_elements]
    ends = np.flatnonzero(written != GAP_ESCAPE)
    if written.size and (not ends.size or ends[-1] != written.size - 1):
        raise ValueError("the last position of a delta is cut off")
    found = np.cumsum(written, dtype=np.int64)[ends] + np.arange(ends.size)
    if found.size != delta.num_changed:
        raise ValueError(f"a delta with {delta.num_changed} changes has {found.size} positions")
    if found.size and found[-1] >= delta.num_elements:
        raise ValueError(f"a delta changes element {found[-1]} of {delta.num_elements}")
    return found


def _read_raw(delta: Delta, data: bytes, count: int) -> Integers:
    if len(data) != count * delta.item_bytes:
        raise ValueError(f"a delta has {len(data)} bytes of values for {count} elements of {delta.item_bytes}")
    return np.frombuffer(bytearray(data), INTEGERS[delta.item_bytes])


def _read_steps(delta: Delta, old: Integers) -> Integers:
    if len(delta.values) < delta.num_changed:
        raise ValueError(f"a delta has {len(delta.values)} bytes of steps for {delta.num_changed} elements")
    steps = np.frombuffer(delta.values, np.int8, count=delta.num_changed)
    is_far = steps == STEP_ESCAPE
    values: Integers = old + steps.astype(old.dtype)  # wraps around, as the subtraction did
    values[is_far] = _read_raw(delta, delta.values[delta.num_changed :], int(is_far.sum()))
    return values
