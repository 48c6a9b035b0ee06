"""One block of memory for all weights that a worker stages: on its GPU if there is room, else in main memory.

For an engine on a GPU, main memory is page-locked, because it is copied to the GPU while decoding is paused. torch's
``pin_memory`` is not used: its allocator rounds every block up to a power of two, so that 14.2 GiB take 16 as one block
and 27 as one block a parameter. CUDA locks the exact bytes of an ordinary block.
"""

import weakref
from typing import Any

import torch

_LEFT_FREE_BYTES = 1 << 30
"""GPU memory that is left free beside the largest parameter: for chunks, activations, and loading weights. A chunk is
received on the GPU, and ends with the parameter that takes it past its size of 256 MiB."""


class StagingMemory:
    """A block of memory. It stays page-locked as long as this object exists.

    Args:
        num_bytes: Size of the block.
        largest: Size of the largest parameter, in bytes.
        device: Device on which the engine computes.

    Attributes:
        block: The block, a one-dimensional uint8 tensor.
    """

    def __init__(self, num_bytes: int, *, largest: int, device: torch.device) -> None:
        where = staging_device(num_bytes + largest, device)
        self.block = torch.empty(num_bytes, dtype=torch.uint8, device=where)
        if device.type == "cuda" and self.block.device.type == "cpu":
            from vllm.v1.kv_offload.cpu import host_register

            registration: Any = host_register
            address = self.block.data_ptr()
            # If it cannot be locked, vLLM logs that copies are slower.
            if registration.host_register(address, num_bytes):
                weakref.finalize(self, registration.host_unregister, address).atexit = False

    def suits(self, num_bytes: int) -> bool:
        """Return whether weights of this size fit and use nearly all of it."""
        return num_bytes <= self.block.numel() <= 1.05 * num_bytes


def staging_device(num_bytes: int, device: torch.device) -> torch.device:
    """Return the engine's GPU if it has room for this memory and some to spare, otherwise the CPU."""
    if device.type != "cuda":
        return torch.device("cpu")
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return device if num_bytes + _LEFT_FREE_BYTES <= free_bytes else torch.device("cpu")
