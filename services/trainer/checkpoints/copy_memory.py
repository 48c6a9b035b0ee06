"""Copies a rank's tensors into one block of main memory, from which a checkpoint is written. The block is reused.

    tensor, tensor, ... --copy--> [tensor|tensor|...]  page-locked if the state is on a GPU

torch's ``pin_memory`` is not used: its allocator rounds every block up to a power of two, so that the tensors of a
model take up to twice their size. CUDA locks the exact bytes of an ordinary block, as for staged weights
(staged_weights.py of the generator, which does it with vLLM's function).
"""

import contextlib
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

cuda: Any = torch.cuda  # partly untyped
_ALIGNMENT = 64
_PORTABLE = 1
"""cudaHostRegisterPortable: locked for every GPU of the process."""


class CopyMemory:
    """Memory for copies of tensors. It is allocated for the first copy, and again if the total size changes."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._unlock: Any = None

    def copy(self, tensors: Sequence[Tensor], *, locks: bool) -> list[Tensor]:
        """Return copies of the tensors in this memory. The next call overwrites the copies.

        Args:
            tensors: On any devices.
            locks: Whether to page-lock the memory, so that a GPU writes to it at full speed.
        """
        num_bytes = sum(_aligned(tensor.nbytes) for tensor in tensors)
        if self._block.numel() != num_bytes:
            self._allocate(num_bytes, locks=locks)
        copies: list[Tensor] = []
        start = 0
        for tensor in tensors:
            place = self._block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(place.copy_(tensor, non_blocking=tensor.is_cuda))
            start += _aligned(tensor.nbytes)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def _allocate(self, num_bytes: int, *, locks: bool) -> None:
        if self._unlock is not None:
            self._unlock()
            self._unlock = None
        self._block = torch.empty(0, dtype=torch.uint8)  # never both at once
        self._block = torch.empty(num_bytes, dtype=torch.uint8)
        if locks and num_bytes:
            self._lock()

    def _lock(self) -> None:
        cudart = cuda.cudart()
        address = self._block.data_ptr()
        code = int(cudart.cudaHostRegister(address, self._block.numel(), _PORTABLE))
        if code:
            log.warning("memory for checkpoints cannot be page-locked (CUDA error %s): copies are slower", code)
            # CUDA keeps the error, and torch would raise it for the next kernel. This is that kernel.
            with contextlib.suppress(RuntimeError, AssertionError):  # AssertionError: a torch without CUDA
                torch.zeros(1, device="cuda").add_(1)
            return
        self._unlock = weakref.finalize(self, cudart.cudaHostUnregister, address)
        self._unlock.atexit = False


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
