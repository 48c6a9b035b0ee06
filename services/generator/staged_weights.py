"""A full copy of a policy's parameters as they were received, kept aside while the engine decodes with older ones.

    push --put--> [name: tensor, digest] --checksum equals the trainer's--> loaded into the engine, between two steps
                        ^
                        +-- a later push changes some of it in place (a delta), and sends the checksum of the whole

torch alone; which engine loads it is not known here. One thread writes it at a time. On a CPU another one computes the
digests, so that a transfer waits for a copy and no more.
"""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from shared import weight_checksum

Spec = tuple[str, torch.dtype, Sequence[int]]
"""Name, dtype and shape of a parameter."""

_LEFT_FREE_BYTES = 1 << 30
"""Of a GPU's memory: activations and the engine's loading want some."""


class StagedWeights:
    """Memory for a full set of parameters.

    Args:
        specs: Names, dtypes and shapes, in the order in which they are pushed.
        device: Where to keep them.

    Attributes:
        tensors: The parameters by name. Who writes to one other than by ``put`` calls ``changed``.
    """

    def __init__(self, specs: Iterable[Spec], *, device: torch.device | None = None) -> None:
        self.specs: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...] = tuple(
            (name, dtype, tuple(shape)) for name, dtype, shape in specs
        )
        where = torch.device("cpu") if device is None else device
        # Pinned: it is copied to the GPU while nothing is decoded.
        is_pinned = where.type == "cpu" and torch.cuda.is_available()
        self.tensors: dict[str, Tensor] = {
            name: torch.empty(shape, dtype=dtype, device=where, pin_memory=is_pinned)
            for name, dtype, shape in self.specs
        }
        self._digests: dict[str, Future[bytes]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest weights")

    def is_for(self, specs: Iterable[Spec]) -> bool:
        """Return whether these are its names, dtypes and shapes, in its order."""
        return self.specs == tuple((name, dtype, tuple(shape)) for name, dtype, shape in specs)

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy one parameter.

        Raises:
            ValueError: It has no place here: another name, dtype or shape.
        """
        place = self.tensors.get(name)
        if place is None or (place.dtype, place.shape) != (tensor.dtype, tensor.shape):
            raise ValueError(f"{name} {tensor.dtype} {tuple(tensor.shape)} came, and was not announced")
        place.copy_(tensor)
        self.changed(name)

    def changed(self, name: str) -> None:
        """Take note that the bytes of a parameter are others now, and will stay so until the next checksum."""
        place = self.tensors[name]
        if place.device.type == "cpu":
            self._digests[name] = self._thread.submit(digest, place)
            return
        # On a GPU it is a matter of the order on this thread's stream.
        self._digests[name] = Future()
        self._digests[name].set_result(digest(place))

    def checksum(self) -> str:
        """Return the checksum of everything that is held, of its bytes as they are here.

        Raises:
            KeyError: Some parameter was never written.
        """
        return weight_checksum.checksum((name, self._digests[name].result()) for name in self.tensors)


def digest(tensor: Tensor) -> bytes:
    """Return the digest of a contiguous tensor's bytes (shared/weight_checksum.py), summed on its device."""
    data = tensor.detach().view(-1).view(torch.uint8)
    if data.device.type == "cpu":
        return weight_checksum.digest(data.numpy())
    return digest_on_device(data)


def digest_on_device(data: Tensor) -> bytes:
    """Return the digest of one-dimensional bytes, summed where they are."""
    whole = data.numel() - data.numel() % (8 * weight_checksum.WORDS_A_ROW)
    words = data[:whole]
    if words.storage_offset() % 8:  # torch takes 64-bit words only where one could begin
        words = words.clone()
    rows = words.view(torch.int64).view(-1, weight_checksum.WORDS_A_ROW)
    # Signed sums wrap as unsigned ones do.
    row_sums, column_sums = (rows.sum(dim).cpu().numpy().astype("<i8").tobytes() for dim in (1, 0))
    return weight_checksum.digest_of_sums(data.numel(), row_sums, column_sums, data[whole:].cpu().numpy().tobytes())


def staging_device(specs: Iterable[Spec], device: torch.device) -> torch.device:
    """Return where to keep the parameters: on the engine's GPU if they fit beside it, else in the host's memory."""
    if device.type != "cuda":
        return torch.device("cpu")
    num_bytes = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in specs)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return device if num_bytes + _LEFT_FREE_BYTES <= free_bytes else torch.device("cpu")
