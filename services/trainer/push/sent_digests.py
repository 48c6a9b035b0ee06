"""The checksum of weights, computed while they are sent; the generator's staged_weights.py is its counterpart."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from services.trainer.push.packing import NamedTensors
from shared.weights import weight_checksum

_PENDING_BYTES = 512 * 1024 * 1024


class SentDigests:
    """Digests of the weights that pass through, computed in a separate thread while they are sent."""

    def __init__(self) -> None:
        self._digests: dict[str, Future[bytes]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest weights")

    def watching(self, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yield ``weights`` and compute the digest of each."""
        pending: deque[tuple[Future[bytes], int]] = deque()
        for name, tensor in weights:
            self._digests[name] = self._thread.submit(digest, tensor)
            pending.append((self._digests[name], tensor.nbytes))
            # Without a limit, gathered or converted weights would pile up in memory.
            while sum(num_bytes for _, num_bytes in pending) > _PENDING_BYTES:
                pending.popleft()[0].result()
            yield name, tensor

    def checksum(self) -> str:
        """Wait for the last digest, and return the checksum of all weights that were yielded."""
        self._thread.shutdown()
        return weight_checksum.checksum((name, found.result()) for name, found in self._digests.items())


def digest(tensor: Tensor) -> bytes:
    """Return the digest of a tensor's bytes, summed on its device."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.device.type == "cpu":
        return weight_checksum.digest(data.numpy())
    return digest_on_device(data)


def digest_on_device(data: Tensor) -> bytes:
    """Return the digest of one-dimensional bytes, summed on their device."""
    whole = data.numel() - data.numel() % (8 * weight_checksum.WORDS_A_ROW)
    words = data[:whole]
    if words.storage_offset() % 8:  # torch requires 64-bit views to be aligned
        words = words.clone()
    rows = words.view(torch.int64).view(-1, weight_checksum.WORDS_A_ROW)
    # Signed sums wrap as unsigned ones do.
    row_sums, column_sums = (rows.sum(dim).cpu().numpy().astype("<i8").tobytes() for dim in (1, 0))
    return weight_checksum.digest_of_sums(data.numel(), row_sums, column_sums, data[whole:].cpu().numpy().tobytes())
