"""The receiving end of the gloo wire, on torch alone: enter a group, take chunks apart.

    rank 0, the trainer --- packed uint8 chunks, broadcast ---> ranks rank_offset .. of this replica's workers
                        --- lifeline, a silent connection --->  closed when the trainer gives up, or dies

Both ends cut the stream into the same chunks from the same names, dtypes and shapes, by the rule of vLLM's packed NCCL
broadcast: a chunk ends with the parameter that takes it past ``buffer_bytes``. Every wait has a deadline.

The lifeline is there because gloo does not always wake a receiver whose sender has closed the connection (seen when
another rank had left before the first broadcast): without it, everybody waits for the deadline.
"""

import math
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

c10d: Any = torch.distributed  # a binding to C++ without complete types
Spec = tuple[str, torch.dtype, list[int]]

_FIRST_POLL_S, _LAST_POLL_S = 0.00005, 0.005
_abandoned: list[tuple[Any, Any]] = []
"""Groups with an operation that will end at its own deadline; destroying one would wait for it."""


class TrainerGroup:
    """This worker's place in one communicator epoch.

    Args:
        master_address: Of the trainer.
        master_port: Of its store.
        rank: Ours.
        world_size: Of all.
        timeout_s: Deadline of the rendezvous; the constructor blocks until every rank is there.

    Raises:
        RuntimeError: Not all came in time, or the trainer gave up.
    """

    def __init__(self, *, master_address: str, master_port: int, rank: int, world_size: int, timeout_s: float) -> None:
        self._lifeline = _connect(master_address, master_port, timeout_s)
        self._group: Any = None
        timeout = timedelta(seconds=timeout_s)
        options = c10d.ProcessGroupGloo._Options()  # noqa: SLF001  the only name it has
        options._timeout = timeout  # noqa: SLF001
        own_address = str(self._lifeline.getsockname()[0])
        try:
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=own_address)]  # noqa: SLF001
            store = c10d.TCPStore(master_address, master_port, None, is_master=False, timeout=timeout)
            self._group = c10d.ProcessGroupGloo(c10d.PrefixStore("weights", store), rank, world_size, options)
        finally:
            if self._group is None:
                self._lifeline.close()

    def receive_chunks(
        self, specs: Iterable[Spec], *, buffer_bytes: int, timeout_s: float
    ) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """Yield the named parameters of each chunk as it arrives. The tensors are the caller's to keep.

        Raises:
            RuntimeError: ``timeout_s`` for all of it has passed, or the trainer gave up.
        """
        deadline = time.monotonic() + timeout_s
        for chunk_of in cut(specs, buffer_bytes):
            chunk = torch.empty(sum(_num_bytes(spec) for spec in chunk_of), dtype=torch.uint8)
            self._receive(chunk, timeout_s=max(deadline - time.monotonic(), 0.001))
            yield unpack(chunk, chunk_of)

    def leave(self) -> None:
        """Close our connections; whoever waits for us gets an error."""
        self._group = None
        self._lifeline.close()

    def _receive(self, chunk: torch.Tensor, *, timeout_s: float) -> None:
        group = self._group
        if group is None:
            raise RuntimeError("this worker has left the communicator")
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_s)
        work = group.broadcast([chunk], options)
        poll_s = _FIRST_POLL_S
        while not work.is_completed():
            if _is_closed(self._lifeline):
                _abandoned[:] = [(g, w) for g, w in _abandoned if not w.is_completed()]
                _abandoned.append((group, work))
                raise RuntimeError("the trainer gave the push up, or died")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _LAST_POLL_S)
        work.wait()


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
    parts: tuple[torch.Tensor, ...] = torch.split(chunk, [_num_bytes(spec) for spec in specs])
    for (name, dtype, shape), part in zip(specs, parts, strict=True):
        is_aligned = part.storage_offset() % dtype.itemsize == 0
        yield name, (part if is_aligned else part.clone()).view(dtype).view(shape)


def _num_bytes(spec: Spec) -> int:
    _, dtype, shape = spec
    return math.prod(shape) * dtype.itemsize


def _connect(host: str, port: int, timeout_s: float) -> socket.socket:
    try:
        connection = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise RuntimeError(f"the trainer cannot be reached at {host}:{port}: {error}") from error
    connection.setblocking(False)
    return connection


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
