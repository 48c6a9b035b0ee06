"""The receiving end of the gloo wire, on torch alone: enter a group, take chunks apart.

    rank 0, the trainer --- packed uint8 chunks, broadcast ---> ranks rank_offset .. of this replica's workers

Both ends cut the stream into the same chunks from the same names, dtypes and shapes, by the rule of vLLM's packed NCCL
broadcast: a chunk ends with the parameter that takes it past ``buffer_bytes``. Every wait has a deadline.
"""

import math
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

Spec = tuple[str, torch.dtype, list[int]]


def enter_group(
    *, master_address: str, master_port: int, rank: int, world_size: int, timeout_s: float
) -> ProcessGroupGloo:
    """Enter the trainer's group; blocks until every rank is there.

    Raises:
        RuntimeError: Not all came within ``timeout_s``, or the trainer gave up.
    """
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(master_address, master_port, None, is_master=False, timeout=timeout)
    options = ProcessGroupGloo._Options()  # noqa: SLF001  the only name it has
    options._timeout = timeout  # noqa: SLF001
    own_address = _address_towards(master_address, master_port)
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address)]  # noqa: SLF001
    return ProcessGroupGloo(PrefixStore("weights", store), rank, world_size, options)


def receive_chunks(
    group: ProcessGroupGloo, specs: Iterable[Spec], *, buffer_bytes: int, timeout_s: float
) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Yield the named parameters of each chunk as it arrives. The tensors are the caller's to keep.

    Raises:
        RuntimeError: ``timeout_s`` for all of it has passed, or a rank left.
    """
    deadline = time.monotonic() + timeout_s
    for chunk_of in cut(specs, buffer_bytes):
        chunk = torch.empty(sum(_num_bytes(spec) for spec in chunk_of), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        group.broadcast([chunk], options).wait()
        yield unpack(chunk, chunk_of)


def cut(specs: Iterable[Spec], buffer_bytes: int) -> Iterator[list[Spec]]:
    """Yield the parameters of each chunk."""
    chunk: list[Spec] = []
    size = 0
    for spec in specs:
        chunk.append(spec)
        size += _num_bytes(spec)
        if size > buffer_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def unpack(chunk: torch.Tensor, specs: Sequence[Spec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters that lie in ``chunk``, as views of it where alignment allows."""
    parts = chunk.split([_num_bytes(spec) for spec in specs])
    for (name, dtype, shape), part in zip(specs, parts, strict=True):
        is_aligned = part.storage_offset() % dtype.itemsize == 0
        yield name, (part if is_aligned else part.clone()).view(dtype).view(shape)


def _num_bytes(spec: Spec) -> int:
    _, dtype, shape = spec
    return math.prod(shape) * dtype.itemsize


def _address_towards(host: str, port: int) -> str:
    """Return our own address on the way to ``host``; connecting a datagram socket sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
