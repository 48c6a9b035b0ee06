"""The sending end of one communicator epoch: rank 0. One implementation for each wire.

    open (listens) --> rendezvous (waits for all other ranks) --> broadcast, broadcast, ... --> close

Every method except the constructor and ``close`` blocks and is called off the event loop. ``close`` may be called from
any thread at any time: every call blocked in this communicator, here or in a generator, then fails with an error.
"""

from typing import Protocol

import torch

from services.trainer.push.gloo_communicator import GlooCommunicator, IpcCommunicator, own_device_uuid
from services.trainer.push.membership import Abilities
from services.trainer.push.nccl_communicator import NcclCommunicator, nccl_version
from shared.control import IpcBuffer, Transport

BUFFER_BYTES = 16 * 1024 * 1024
"""Chunk size over gloo. Three chunks are packed, sent and staged in parallel. Memory of this size is reused, while
larger blocks are allocated anew."""
_GPU_BUFFER_BYTES = 256 * 1024 * 1024
"""Chunk size between GPUs, where each chunk costs a call and a wait."""


class Communicator(Protocol):
    """The interface of a transport that a push needs."""

    @property
    def is_streamed(self) -> bool:
        """Whether weights go through ``broadcast``. If not, the begin body says where the generators find them."""
        ...

    @property
    def port(self) -> int:
        """Port at which the other ranks reach this one."""
        ...

    @property
    def nccl_unique_id(self) -> str | None:
        """The unique id that the other ranks need for NCCL; None for other transports."""
        ...

    def export(self) -> IpcBuffer | None:
        """Return a handle of the memory that one more worker maps, for ipc; None for other transports."""
        ...

    def rendezvous(self, *, world_size: int, timeout_s: float) -> None:
        """Wait until every rank has entered.

        Raises:
            PushError: A rank did not enter within ``timeout_s``, or the communicator was closed.
        """
        ...

    def broadcast(self, chunk: torch.Tensor, *, timeout_s: float) -> None:
        """Send a uint8 tensor to all ranks. It may still be in transit on return, and must not change meanwhile.

        Raises:
            PushError: This chunk or the last one was not received within ``timeout_s``, a rank died, or the
                communicator was closed.
        """
        ...

    def finish(self, *, timeout_s: float) -> None:
        """Wait until the last broadcast was received.

        Raises:
            PushError: As in ``broadcast``.
        """
        ...

    def close(self) -> None:
        """Release all ranks, at once."""
        ...


class NoWire:
    """For transports without a rendezvous: sends nothing and has no ranks to release."""

    is_streamed = False
    port = 1
    nccl_unique_id: str | None = None

    def export(self) -> None:
        """See Communicator."""

    def rendezvous(self, *, world_size: int, timeout_s: float) -> None:
        """See Communicator."""

    def broadcast(self, chunk: torch.Tensor, *, timeout_s: float) -> None:
        """See Communicator."""

    def finish(self, *, timeout_s: float) -> None:
        """See Communicator."""

    def close(self) -> None:
        """See Communicator."""


def open_communicator(transport: Transport, *, address: str, buffer_bytes: int) -> Communicator:
    """Return a communicator that generators can join at ``address``.

    Args:
        transport: The transport to open.
        address: Local address that the generators can reach.
        buffer_bytes: Size of the ipc buffer.

    Raises:
        PushError: It cannot be opened now.
        UserError: ``address`` does not belong to this machine.
    """
    match transport:
        case "gloo":
            return GlooCommunicator(address=address)
        case "nccl":
            return NcclCommunicator()
        case "ipc":
            return IpcCommunicator(address=address, buffer_bytes=buffer_bytes)
        case "disk" | "simulated":
            return NoWire()


def chunk_bytes(transport: Transport) -> int:
    """Return the size after which a chunk is cut, in bytes."""
    return _GPU_BUFFER_BYTES if transport in ("nccl", "ipc") else BUFFER_BYTES


def own_abilities() -> Abilities:
    """Return the versions and the GPU of this process, to compare with the generators'."""
    return Abilities(
        torch_version=str(torch.__version__),
        nccl_version=nccl_version() if torch.cuda.is_available() else None,
        device_uuid=own_device_uuid(),
    )
