"""Staging memory: a full copy of a policy's received parameters, kept while the engine decodes with older ones.

    push --put--> [name: tensor, digest] --checksum equals the trainer's--> loaded into the engine, between two steps
                        ^
                        +--put_delta-- a later push changes some of it, and sends the checksum of the whole

Uses only torch, and does not know which engine loads the weights. Only one thread writes at a time. On a CPU, other
threads compute the digests, so that a transfer waits only for copies.

All of a delta (shared/weights/weight_delta.py) is checked before the first element is written, so a refused one changes
nothing.
"""

import os
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from shared.weights import weight_checksum
from shared.weights.parameter_spec import Spec
from shared.weights.weight_delta import Values, parse_delta

_ALIGNMENT = 64
"""Every parameter begins at a multiple of this many bytes, as torch's own allocations on a CPU do."""
_LEFT_FREE_BYTES = 1 << 30
"""GPU memory that is left free beside the largest parameter: for chunks, activations, and loading weights. A chunk is
received on the GPU, and ends with the parameter that takes it past its size of 256 MiB."""
_TORCH_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StagedWeights:
    """One full set of received parameters in staging memory, with their digests.

    Args:
        specs: Names, dtypes and shapes, in the order in which they are pushed.
        block: A uint8 tensor of at least ``staging_bytes(specs)``, which the parameters share; new memory if left out.

    Attributes:
        specs: As given, as a tuple.
        tensors: The parameters by name. Code that writes to a tensor itself must call ``changed``.
        complete: Checksum of the version in this memory, the base for a delta; None if the version is not complete.
    """

    def __init__(self, specs: Iterable[Spec], *, block: Tensor | None = None) -> None:
        self.specs = tuple(specs)
        self.complete: str | None = None
        if block is None:
            block = torch.empty(staging_bytes(self.specs), dtype=torch.uint8)
        self.tensors: dict[str, Tensor] = {}
        start = 0
        for spec in self.specs:
            end = start + spec.num_bytes
            self.tensors[spec.name] = block[start:end].view(spec.dtype).view(spec.shape)
            start = _aligned(end)
        self._digests: dict[str, Future[bytes]] = {}
        self._threads = ThreadPoolExecutor(digest_threads(os.cpu_count() or 1), thread_name_prefix="digest weights")

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy one received parameter into its place.

        Raises:
            ValueError: The name, dtype or shape was not announced.
        """
        place = self.tensors.get(name)
        if place is None or (place.dtype, place.shape) != (tensor.dtype, tensor.shape):
            raise ValueError(f"{name} {tensor.dtype} {tuple(tensor.shape)} was received but not announced")
        place.copy_(tensor)
        self.changed(name)

    def put_delta(self, name: str, delta: bytes) -> None:
        """Apply a delta to the current values of one parameter.

        Raises:
            ValueError: The delta is damaged, or is for a parameter of another size. The parameter is unchanged.
        """
        apply_delta(self.tensors[name], delta)
        self.changed(name)

    def changed(self, name: str) -> None:
        """Begin to compute the digest of a written parameter, which must not change until the next checksum."""
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
    return weight_checksum.digest_on_device(data, int64=torch.int64)


def staging_bytes(specs: Iterable[Spec]) -> int:
    """Return the bytes of staging memory for these parameters, each of which takes a multiple of 64 bytes."""
    return sum(_aligned(spec.num_bytes) for spec in specs)


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
        elements.copy_(torch.from_numpy(delta.read_raw()))
        return
    positions = torch.from_numpy(delta.read_positions()).to(target.device)
    values = delta.read_raw() if delta.values_as is Values.RAW else delta.read_steps(elements[positions].cpu().numpy())
    elements[positions] = torch.from_numpy(values).to(target.device)


class StagingMemory:
    """One block of memory for all weights that a worker stages.

    It is on the worker's GPU if there is room and the trainer does not use that GPU, otherwise in main memory.

    For an engine on a GPU, main memory is page-locked as long as this object exists, because it is copied to the GPU
    while decoding is paused. torch's ``pin_memory`` is not used: its allocator rounds every block up to a power of two,
    so that 14.2 GiB take 16 GiB as one block and 27 GiB as one block per parameter. CUDA locks the exact bytes of an
    ordinary block.

    Args:
        num_bytes: Size of the block, a one-dimensional uint8 tensor.
        largest: Size of the largest parameter, in bytes.
        device: Device on which the engine computes.
        shares_gpu: Whether the trainer computes on that device, too.
    """

    def __init__(self, num_bytes: int, *, largest: int, device: torch.device, shares_gpu: bool = False) -> None:
        where = staging_device(num_bytes + largest, device, shares_gpu=shares_gpu)
        self.block = torch.empty(num_bytes, dtype=torch.uint8, device=where)
        if device.type == "cuda" and self.block.device.type == "cpu":
            from vllm.v1.kv_offload.cpu import host_register

            registration: Any = host_register
            address = self.block.data_ptr()
            # If it cannot be locked, vLLM logs that copies are slower.
            if registration.host_register(address, num_bytes):
                weakref.finalize(self, registration.host_unregister, address).atexit = False

    def suits(self, num_bytes: int) -> bool:
        """Return whether weights of ``num_bytes`` fit into the block, and fill at least 95 % of it."""
        return num_bytes <= self.block.numel() <= 1.05 * num_bytes


def staging_device(num_bytes: int, device: torch.device, *, shares_gpu: bool = False) -> torch.device:
    """Return the engine's GPU if it has room for this memory and some to spare, otherwise the CPU.

    If the trainer uses the same GPU, it is the CPU: the trainer's first step needs that GPU's free memory for gradients
    and moments.
    """
    if device.type != "cuda" or shares_gpu:
        return torch.device("cpu")
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return device if num_bytes + _LEFT_FREE_BYTES <= free_bytes else torch.device("cpu")
