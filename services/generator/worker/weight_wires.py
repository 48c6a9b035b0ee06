"""The wires over which a worker receives weights from the trainer. Each communicator epoch is one wire.

    open_wire (blocks until every rank is there) --> receive_chunks, receive_chunks, ... --> leave

All of this runs in a thread of the worker (worker_transfer.py), except ``leave``, which other threads may call.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from services.generator.worker.disk_wire import DiskReader
from services.generator.worker.gloo_wire import TrainerGroup
from services.generator.worker.ipc_wire import IpcGroup, map_buffer
from services.generator.worker.staged_weights import Spec
from shared.weights.weight_places import IpcBuffer


class Wire(Protocol):
    """This worker's place in one communicator epoch."""

    def receive_chunks(
        self, specs: Iterable[Spec], *, buffer_bytes: int, timeout_s: float
    ) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yield the named parameters of each chunk as it arrives. They are valid until the next chunk is requested.

        Raises:
            RuntimeError: The whole transfer took longer than ``timeout_s``, or the trainer gave up.
        """
        ...

    def leave(self) -> None:
        """Close this worker's connections. Ranks that wait for it, and calls that wait here, fail with an error."""
        ...


def open_wire(where: dict[str, Any], *, rank: int, device: torch.device) -> Wire | DiskReader:
    """Enter the trainer's communicator; blocks until every rank is there.

    Args:
        where: Fields of the join body, including ``transport``.
        rank: This worker's rank within its replica.
        device: Device on which the engine computes.

    Raises:
        RuntimeError: Not all ranks came in time, or the trainer gave up.
    """
    if where["transport"] == "nccl":
        from services.generator.worker.nccl_wire import NcclWire

        return NcclWire(
            unique_id=str(where["nccl_unique_id"]),
            rank=int(where["rank_offset"]) + rank,
            world_size=int(where["world_size"]),
            device=device,
        )
    if where["transport"] == "disk":
        return DiskReader(str(where["weight_dir"]))
    group = TrainerGroup(
        master_address=str(where["master_address"]),
        master_port=int(where["master_port"]),
        rank=int(where["rank_offset"]) + rank,
        world_size=int(where["world_size"]),
        timeout_s=float(where["timeout_s"]),
    )
    if where["transport"] != "ipc":
        return group
    try:
        return IpcGroup(group, map_buffer(IpcBuffer.model_validate(where["ipc_buffer"]), device))
    except (RuntimeError, ValueError):
        group.leave()
        raise
