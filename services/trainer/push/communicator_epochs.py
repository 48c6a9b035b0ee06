"""The communicator epochs of one trainer incarnation: which communicator is open, and which replicas are its members.

    same members, same transport                 --> keep the open communicator
    anything else                                --> close it and open a new one
    a transport without a wire, a late replica   --> it joins the open communicator

Epochs are numbered within an incarnation, and each number begins with the incarnation (lineage.py), so they rise across
incarnations too. Members are also asked here to give up an epoch, and to release their GPU memory until the next push.
"""

import asyncio
import logging
from collections.abc import Iterable

import torch

from services.trainer.push.blame import AttemptError
from services.trainer.push.communicator import Communicator, GlooCommunicator, NcclCommunicator, NoWire
from services.trainer.push.ipc_communicator import IpcCommunicator, own_device_uuid
from services.trainer.push.membership import Abilities
from services.trainer.push.nccl import nccl_version
from services.trainer.push.replicas import Fleet, Member, Replica
from shared.control import AbortRequest, ReplicaInfo, SleepRequest, Transport
from shared.errors import HeadraceError, PushError
from shared.lineage import epoch_of

log = logging.getLogger(__name__)

BUFFER_BYTES = 16 * 1024 * 1024
"""Chunk size over gloo. Three chunks are packed, sent and staged in parallel. Memory of this size is reused, while
larger blocks are allocated anew."""
_GPU_BUFFER_BYTES = 256 * 1024 * 1024
"""Chunk size between GPUs, where each chunk costs a call and a wait."""
_ABORT_TIMEOUT_S = 5.0


class CommunicatorEpochs:
    """Holds the open communicator, if there is one.

    Args:
        run_id: The run's id.
        incarnation: The trainer's incarnation.
        bind_address: Address of this machine that the generators can reach.
        buffer_bytes: Size after which a packed chunk is cut; None chooses a size for the transport.

    Attributes:
        current: Number of the newest epoch; 0 before the first.
        bind_address: See above.
    """

    def __init__(self, *, run_id: str, incarnation: int, bind_address: str, buffer_bytes: int | None) -> None:
        self.current = 0
        self._run_id = run_id
        self._incarnation = incarnation
        self.bind_address = bind_address
        self._buffer_bytes = buffer_bytes
        self._num_epochs = 0
        self._communicator: Communicator | None = None
        self._members: set[str] = set()
        self._transport: Transport | None = None

    @property
    def transport(self) -> Transport | None:
        """The transport of the newest epoch; None before the first."""
        return self._transport

    def enter(self, fleet: Fleet) -> tuple[Communicator, dict[str, Member]]:
        """Return the communicator of a push, and the replicas that have to join it: none, all, or only late ones.

        A wire has a fixed set of members, so a new member needs a new epoch. Without a wire, a late replica joins the
        current epoch and the other members stay.

        Raises:
            AttemptError: A new communicator cannot be opened now.
        """
        outside = {name: member for name, member in fleet.ready.items() if member.info.epoch != self.current}
        communicator = self._communicator if self._transport == fleet.requirements.transport else None
        if communicator is not None and not communicator.is_streamed:
            # A replica that has left this epoch would refuse to join it again.
            if not outside.keys() & self._members:
                self._members |= outside.keys()
                return communicator, outside
        elif communicator is not None and not outside and set(fleet.ready) == self._members:
            return communicator, {}
        return self._open(fleet), fleet.ready

    def chunk_bytes(self, transport: Transport) -> int:
        """Return the size after which a chunk is cut, in bytes."""
        return self._buffer_bytes or (_GPU_BUFFER_BYTES if transport in ("nccl", "ipc") else BUFFER_BYTES)

    async def abort(self, members: Iterable[Member], *, reason: str) -> list[ReplicaInfo]:
        """Close the communicator, have these members give it up, and return the states that they answer with."""
        self.close()
        if not self.current:
            return []  # no replica knows of this push yet
        body = AbortRequest(run_id=self._run_id, epoch=self.current, reason=reason[:500])

        async def one(replica: Replica) -> ReplicaInfo | None:
            try:
                return await replica.abort(body, timeout_s=_ABORT_TIMEOUT_S)
            except HeadraceError as error:
                log.info("abort was not confirmed: %s", error)
                return None

        answers = await asyncio.gather(*(one(member.replica) for member in members))
        return [info for info in answers if info is not None]

    async def let_sleep(self, members: Iterable[Member], *, timeout_s: float) -> None:
        """Have the members of the current epoch release their GPU memory until the next begin. Failures are logged."""
        body = SleepRequest(run_id=self._run_id, epoch=self.current)

        async def one(replica: Replica) -> None:
            try:
                await replica.sleep(body, timeout_s=timeout_s)
            except HeadraceError as error:
                log.warning("a generator did not release its GPU memory: %s", error)

        inside = [member.replica for member in members if member.info.epoch == self.current]
        await asyncio.gather(*(one(replica) for replica in inside))

    def close(self) -> None:
        """Close the communicator, which wakes every thread blocked in it. The next push opens a new one."""
        if self._communicator is not None:
            self._communicator.close()
        self._communicator = None
        self._members = set()

    def _open(self, fleet: Fleet) -> Communicator:
        self.close()
        self._num_epochs += 1
        self.current = epoch_of(self._incarnation, self._num_epochs)
        transport = fleet.requirements.transport
        try:
            self._communicator = open_communicator(
                transport, address=self.bind_address, buffer_bytes=self.chunk_bytes(transport)
            )
        except PushError as error:
            raise AttemptError(str(error), blamed={}) from error
        self._members = set(fleet.ready)
        self._transport = transport
        return self._communicator


def own_abilities() -> Abilities:
    """Return the versions and the GPU of this process, to compare with the generators'."""
    return Abilities(
        torch_version=str(torch.__version__),
        nccl_version=nccl_version() if torch.cuda.is_available() else None,
        device_uuid=own_device_uuid(),
    )


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
