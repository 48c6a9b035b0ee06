"""Staging memory: a full copy of a policy's received parameters, kept while the engine decodes with older ones.

    push --put--> [name: tensor, digest] --checksum equals the trainer's--> loaded into the engine, between two steps
                        ^
                        +-- a later push changes some of it in place (a delta), and sends the checksum of the whole

Uses only torch, and does not know which engine loads the weights. Only one thread writes at a time. On a CPU, a second
thread computes the digests, so that a transfer waits only for copies.
"""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from shared.weights import weight_checksum

Spec = tuple[str, torch.dtype, Sequence[int]]
"""Name, dtype and shape of a parameter."""

_LEFT_FREE_BYTES = 1 << 30
"""GPU memory that is left free, for activations and for loading weights into the engine."""


class StagedWeights:
    """Memory for a full set of parameters.

    Args:
        specs: Names, dtypes and shapes, in the order in which they are pushed.
        device: Device that holds the memory; the CPU if left out.

    Attributes:
        tensors: The parameters by name. Code that writes to a tensor without ``put`` must call ``changed``.
    """

    def __init__(self, specs: Iterable[Spec], *, device: torch.device | None = None) -> None:
        self.specs: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...] = tuple(
            (name, dtype, tuple(shape)) for name, dtype, shape in specs
        )
        where = torch.device("cpu") if device is None else device
        # Pinned, because it is copied to the GPU while decoding is held.
        is_pinned = where.type == "cpu" and torch.cuda.is_available()
        self.tensors: dict[str, Tensor] = {
            name: torch.empty(shape, dtype=dtype, device=where, pin_memory=is_pinned)
            for name, dtype, shape in self.specs
        }
        self._digests: dict[str, Future[bytes]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest weights")

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

    def changed(self, name: str) -> None:
        """Note that a parameter's bytes have changed. They must stay as they are until the next checksum."""
        place = self.tensors[name]
        if place.device.type == "cpu":
            self._digests[name] = self._thread.submit(digest, place)
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


def staging_device(specs: Iterable[Spec], device: torch.device) -> torch.device:
    """Return the device for staging: the engine's GPU if the parameters fit there too, otherwise the CPU."""
    if device.type != "cuda":
        return torch.device("cpu")
    num_bytes = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in specs)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return device if num_bytes + _LEFT_FREE_BYTES <= free_bytes else torch.device("cpu")
