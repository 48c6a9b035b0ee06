"""Staging memory: a full copy of a policy's received parameters, kept while the engine decodes with older ones.

    push --put--> [name: tensor, digest] --checksum equals the trainer's--> loaded into the engine, between two steps
                        ^
                        +--put_delta-- a later push changes some of it, and sends the checksum of the whole

Uses only torch, and does not know which engine loads the weights. Only one thread writes at a time. On a CPU, other
threads compute the digests, so that a transfer waits only for copies.

Decodes the deltas that sent_weights.py of the trainer encodes; shared/weights/weight_delta.py defines the format. All
of a delta is checked before the first element is written, so a refused delta changes nothing.
"""

import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.weights import weight_checksum
from shared.weights.weight_delta import GAP_ESCAPE, INTEGERS, STEP_ESCAPE, Delta, Positions, Values, parse_delta

Integers = npt.NDArray[np.signedinteger[Any]]
Spec = tuple[str, torch.dtype, Sequence[int]]
"""Name, dtype and shape of a parameter."""

_ALIGNMENT = 64
"""Every parameter begins at a multiple of this many bytes, as torch's own allocations on a CPU do."""
_TORCH_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StagedWeights:
    """Memory for a full set of parameters.

    Args:
        specs: Names, dtypes and shapes, in the order in which they are pushed.
        block: A uint8 tensor of at least ``staging_bytes(specs)``, which the parameters share; new memory if left out.
        num_threads: Threads that compute digests; if left out, ``digest_threads`` of this machine's cores.

    Attributes:
        tensors: The parameters by name. Code that writes to a tensor itself must call ``changed``.
    """

    def __init__(self, specs: Iterable[Spec], *, block: Tensor | None = None, num_threads: int | None = None) -> None:
        self.specs: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...] = tuple(
            (name, dtype, tuple(shape)) for name, dtype, shape in specs
        )
        if block is None:
            block = torch.empty(staging_bytes(self.specs), dtype=torch.uint8)
        self.tensors: dict[str, Tensor] = {}
        start = 0
        for name, dtype, shape in self.specs:
            end = start + math.prod(shape) * dtype.itemsize
            self.tensors[name] = block[start:end].view(dtype).view(shape)
            start = _aligned(end)
        self._digests: dict[str, Future[bytes]] = {}
        self._threads = ThreadPoolExecutor(
            num_threads or digest_threads(os.cpu_count() or 1), thread_name_prefix="digest weights"
        )

    def is_for(self, specs: Iterable[Spec]) -> bool:
        """Return whether these are its names, dtypes and shapes, in the same order."""
        return self.specs == tuple((name, dtype, tuple(shape)) for name, dtype, shape in specs)

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy one parameter.

        Raises:
            ValueError: The name, dtype or shape was not announced.
        """
        place = self.tensors.get(name)
        if place is None or (place.dtype, place.shape) != (tensor.dtype, tensor.shape):
            raise ValueError(f"{name} {tensor.dtype} {tuple(tensor.shape)} was received but not announced")
        place.copy_(tensor)
        self.changed(name)

    def put_delta(self, name: str, delta: bytes) -> None:
        """Change one parameter by a delta, which must start from its current values.

        Raises:
            ValueError: The delta is damaged, or is for a parameter of another size; nothing has changed.
        """
        apply_delta(self.tensors[name], delta)
        self.changed(name)

    def changed(self, name: str) -> None:
        """Note that a parameter's bytes have changed. They must stay as they are until the next checksum."""
        place = self.tensors[name]
        if place.device.type == "cpu":
            self._digests[name] = self._threads.submit(digest, place)
            return
        # On a GPU, the order of operations on this thread's stream is enough.
        self._digests[name] = Future()
        self._digests[name].set_result(digest(place))

    def checksum(self) -> str:
        """Return the checksum of all parameters, computed from their bytes in this memory.

        Raises:
            KeyError: A parameter was never written.
        """
        return weight_checksum.checksum((name, self._digests[name].result()) for name in self.tensors)


def digest(tensor: Tensor) -> bytes:
    """Return the digest of a contiguous tensor's bytes (weight_checksum.py), summed on the tensor's device."""
    data = tensor.detach().view(-1).view(torch.uint8)
    if data.device.type == "cpu":
        return weight_checksum.digest(data.numpy())
    return digest_on_device(data)


def digest_on_device(data: Tensor) -> bytes:
    """Return the digest of a one-dimensional tensor of bytes, summed on its device."""
    whole = data.numel() - data.numel() % (8 * weight_checksum.WORDS_A_ROW)
    words = data[:whole]
    if words.storage_offset() % 8:  # torch can view bytes as 64-bit words only at an aligned offset
        words = words.clone()
    rows = words.view(torch.int64).view(-1, weight_checksum.WORDS_A_ROW)
    # Signed sums wrap around as unsigned ones do.
    row_sums, column_sums = (rows.sum(dim).cpu().numpy().astype("<i8").tobytes() for dim in (1, 0))
    return weight_checksum.digest_of_sums(data.numel(), row_sums, column_sums, data[whole:].cpu().numpy().tobytes())


def staging_bytes(specs: Iterable[Spec]) -> int:
    """Return the size of the memory for these parameters, in bytes: theirs, and up to 63 bytes between two of them."""
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for _, dtype, shape in specs)


def digest_threads(num_cores: int) -> int:
    """Return how many threads of one worker compute digests, on a machine that may have eight workers.

    One thread reads about 10 GB/s, less than a network of 100 Gbit/s brings.
    """
    return max(1, min(4, num_cores // 8))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def apply_delta(target: Tensor, data: bytes) -> None:
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
