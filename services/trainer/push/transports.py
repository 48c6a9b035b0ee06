"""This machine's abilities for a push, and the communicators it can open."""

import torch

from services.trainer.push.communicator import Communicator, GlooCommunicator, NcclCommunicator, NoWire
from services.trainer.push.fleet import Abilities
from services.trainer.push.ipc_communicator import IpcCommunicator, own_device_uuid
from services.trainer.push.nccl import nccl_version
from shared.control import Transport


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
