"""Opens the wires over which a worker receives weights from the trainer. Each communicator epoch has its own wire.

    open_wire (blocks until every rank is there) --> receive_version, receive_version, ... --> leave

    gloo, nccl, ipc   chunks of parameters     --> overwrite the staged parameters (a full version)
                      chunks of deltas, uint8  --> applied to the staged parameters, which must be the delta's base
    disk              files (disk_wire.py)     --> either

All of this runs in a thread of the worker (worker_transfer.py), except ``leave``, which other threads may call.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from services.generator.worker.disk_wire import DiskWire
from services.generator.worker.gloo_wire import GlooWire
from services.generator.worker.ipc_wire import IpcWire, map_buffer
from services.generator.worker.staged_weights import StagedWeights
from shared.control import DiskPlace, IpcBuffer
from shared.weights.parameter_spec import Spec, cut, total_bytes


class ChunkWire(Protocol):
    """This worker's connection to the trainer in one communicator epoch, over which weights arrive in chunks."""

    @property
    def device(self) -> torch.device:
        """Device on which chunks arrive."""
        ...

    def receive(self, chunk: torch.Tensor, *, deadline: float) -> None:
        """Fill a uint8 tensor with the trainer's next chunk.

        Raises:
            RuntimeError, PushError: It did not come by ``deadline`` (monotonic seconds), the trainer gave up, or this
                worker has left.
        """
        ...

    def leave(self) -> None:
        """Close this worker's connections. Ranks that wait for it, and calls that wait here, fail with an error."""
        ...


Wire = ChunkWire | DiskWire


def open_wire(
    where: dict[str, Any], *, rank: int, device: torch.device, is_given_up: Callable[[], bool] = lambda: False
) -> Wire:
    """Enter the trainer's communicator, and return this worker's wire once every rank is there.

    With the transport ``disk`` there is no communicator, so it returns at once.

    Args:
        where: Fields of JoinRequest, including ``transport``.
        rank: This worker's rank within its replica.
        device: Device on which the engine computes.
        is_given_up: Returns whether the push was given up. Only NCCL needs it: gloo and ipc notice that the trainer has
            closed its socket.

    Raises:
        RuntimeError, PushError: Not all ranks came in time, or the trainer gave up.
    """
    if where["transport"] == "disk":
        return DiskWire(where["weight_dir"])
    place = {"rank": where["rank_offset"] + rank, "world_size": where["world_size"], "timeout_s": where["timeout_s"]}
    if where["transport"] == "nccl":
        from services.generator.worker.nccl_wire import NcclWire

        return NcclWire(**place, unique_id=where["nccl_unique_id"], device=device, is_given_up=is_given_up)
    gloo = GlooWire(**place, master_address=where["master_address"], master_port=where["master_port"])
    if where["transport"] != "ipc":
        return gloo
    try:
        return IpcWire(gloo, map_buffer(IpcBuffer.model_validate(where["ipc_buffer"]), device))
    except (RuntimeError, ValueError):
        gloo.leave()
        raise


def receive_version(staged: StagedWeights, wire: Wire, what: dict[str, Any], *, buffer_bytes: int) -> None:
    """Bring staging memory to the version that a BeginRequest announces.

    Args:
        staged: Staging memory for the announced parameters, in their order. After an error it is not complete, because
            some of it may be new.
        wire: The wire to receive from.
        what: Fields of BeginRequest: ``timeout_s``, and ``sizes``, ``base_checksum`` or ``place`` if it has them.
        buffer_bytes: Size in bytes after which a chunk ends.

    Raises:
        RuntimeError, PushError: The time is up, the trainer gave up, a file is missing or damaged, or a delta starts
            from other weights than the staged ones.
        ValueError: A parameter or a delta differs from the announcement.
    """
    timeout_s = float(what["timeout_s"])
    if isinstance(wire, DiskWire):
        wire.receive_into(staged, DiskPlace.model_validate(what["place"]), timeout_s=timeout_s)
        return
    base, staged.complete = staged.complete, None
    sizes: Sequence[int] | None = what.get("sizes")
    if sizes is not None and (base is None or what.get("base_checksum") != base):
        raise RuntimeError("the trainer's delta starts from other weights than this worker has staged")
    travelling = staged.specs
    if sizes is not None:
        travelling = tuple(
            Spec(spec.name, torch.uint8, (size,)) for spec, size in zip(staged.specs, sizes, strict=True)
        )
    for chunk in receive_chunks(wire, travelling, buffer_bytes=buffer_bytes, timeout_s=timeout_s):
        for name, tensor in chunk:
            if sizes is None:
                staged.put(name, tensor)
            else:
                staged.put_delta(name, tensor.cpu().numpy().tobytes())
    staged.complete = staged.checksum()


def receive_chunks(
    wire: ChunkWire, specs: Iterable[Spec], *, buffer_bytes: int, timeout_s: float
) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Yield the named parameters of each chunk as it arrives. They are valid until the next chunk is requested.

    Raises:
        RuntimeError, PushError: The whole transfer took longer than ``timeout_s``, or the trainer gave up.
    """
    deadline = time.monotonic() + timeout_s
    for chunk_of in cut(specs, buffer_bytes):
        chunk = torch.empty(total_bytes(chunk_of), dtype=torch.uint8, device=wire.device)
        wire.receive(chunk, deadline=deadline)
        yield unpack(chunk, chunk_of)


def unpack(chunk: torch.Tensor, specs: Sequence[Spec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters in ``chunk``, as views of it where the alignment allows that."""
    parts: tuple[torch.Tensor, ...] = torch.split(chunk, [spec.num_bytes for spec in specs])
    for (name, dtype, shape), part in zip(specs, parts, strict=True):
        is_aligned = part.storage_offset() % dtype.itemsize == 0
        yield name, (part if is_aligned else part.clone()).view(dtype).view(shape)
