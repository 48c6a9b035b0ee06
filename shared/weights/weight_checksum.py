"""Computes checksums of weights at the speed of memory. They find accidental damage, not deliberate changes.

    bytes of a parameter --> digest of the parameter    (name, digest) of all --> checksum of the set

The bytes are taken as a matrix of 64-bit words. Its row sums and column sums, both modulo 2**64, are hashed with
BLAKE2b. One changed word changes a sum of each kind. Words or blocks that trade places change sums of at least one
kind. A hash over all bytes would be slower than the transfers that it checks.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

WORDS_A_ROW: Final = 512
"""Bytes that do not fill a row are hashed as they are."""
_ROW_BYTES = 8 * WORDS_A_ROW
_DIGEST_BYTES = 16
_BLOCK_ROWS = 256
"""Rows that are summed at a time, in both directions: 1 MiB stays in a cache, and takes long enough that threads run
beside each other between two turns of the interpreter. With 64 rows, a second thread gained nothing."""


def digest(data: Bytes) -> bytes:
    """Return the 16-byte digest of a contiguous one-dimensional uint8 array."""
    num_rows = data.size // _ROW_BYTES
    rows = data[: num_rows * _ROW_BYTES].view("<u8").reshape(num_rows, WORDS_A_ROW)
    row_sums = np.zeros(num_rows, dtype="<u8")
    column_sums = np.zeros(WORDS_A_ROW, dtype="<u8")
    for start in range(0, num_rows, _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        np.sum(block, axis=1, out=row_sums[start : start + _BLOCK_ROWS])
        column_sums += block.sum(axis=0)
    rest = data[num_rows * _ROW_BYTES :]
    return _digest_of_sums(data.size, row_sums.tobytes(), column_sums.tobytes(), rest.tobytes())


def digest_on_device(data: Any, *, int64: Any) -> bytes:
    """Return the digest of a one-dimensional uint8 tensor of torch, summed on its device.

    ``int64`` is torch.int64: this module does not import torch.
    """
    whole = data.numel() - data.numel() % _ROW_BYTES
    words = data[:whole]
    if words.storage_offset() % 8:  # torch requires 64-bit views to be aligned
        words = words.clone()
    rows = words.view(int64).view(-1, WORDS_A_ROW)
    # Signed sums wrap around as unsigned ones do.
    row_sums, column_sums = (rows.sum(dim).cpu().numpy().astype("<i8").tobytes() for dim in (1, 0))
    return _digest_of_sums(data.numel(), row_sums, column_sums, data[whole:].cpu().numpy().tobytes())


def _digest_of_sums(num_bytes: int, row_sums: bytes, column_sums: bytes, rest: bytes) -> bytes:
    found = hashlib.blake2b(num_bytes.to_bytes(8, "little"), digest_size=_DIGEST_BYTES)
    if row_sums:
        found.update(row_sums)
        found.update(column_sums)
    found.update(rest)
    return found.digest()


def checksum(digests: Iterable[tuple[str, bytes]]) -> str:
    """Return the checksum of a set of named parameters. Their order does not matter."""
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name, one in sorted(digests):
        encoded = name.encode()
        found.update(len(encoded).to_bytes(4, "little") + encoded + one)
    return found.hexdigest()
