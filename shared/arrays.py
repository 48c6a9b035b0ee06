"""Packs number arrays for the wire: little-endian, no header, no pickle.

    token ids   int32      logprobs   float32      loss mask   uint8

An array's length follows from its number of bytes. messages.py checks that lengths agree.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ID_DTYPE = np.dtype("<i4")
LOGPROB_DTYPE = np.dtype("<f4")
MASK_DTYPE = np.dtype("u1")

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint8]


def pack_ids(values: Sequence[int] | Ids) -> bytes:
    """Return token ids as little-endian int32 bytes."""
    return np.asarray(values, dtype=ID_DTYPE).tobytes()


def pack_logprobs(values: Sequence[float] | Logprobs) -> bytes:
    """Return logprobs (nats) as little-endian float32 bytes."""
    return np.asarray(values, dtype=LOGPROB_DTYPE).tobytes()


def pack_mask(values: Sequence[int] | Mask) -> bytes:
    """Return a 0/1 mask as uint8 bytes."""
    return np.asarray(values, dtype=MASK_DTYPE).tobytes()


def unpack_ids(data: bytes) -> Ids:
    """Return a read-only int32 view of packed token ids."""
    return np.frombuffer(data, dtype=ID_DTYPE)


def unpack_logprobs(data: bytes) -> Logprobs:
    """Return a read-only float32 view of packed logprobs."""
    return np.frombuffer(data, dtype=LOGPROB_DTYPE)


def unpack_mask(data: bytes) -> Mask:
    """Return a read-only uint8 view of a packed mask."""
    return np.frombuffer(data, dtype=MASK_DTYPE)
