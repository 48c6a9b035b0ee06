"""What this machine brings to a push, and the communicators it can open."""

import torch

from services.trainer.push.communicator import Communicator, GlooCommunicator, NcclCommunicator, NoWire
from services.trainer.push.fleet import Abilities
from services.trainer.push.ipc_communicator import IpcCommunicator, own_device_uuid
from services.trainer.push.nccl import nccl_version
from shared.control import Transport


def own_abilities() -> Abilities:
    """Return versions and GPU of this process: what the generators' are compared with."""
    return Abilities(
        torch_version=str(torch.__version__),
        nccl_version=nccl_version() if torch.cuda.is_available() else None,
        device_uuid=own_device_uuid(),
    )


def open_communicator(transport: Transport, *, address: str, buffer_bytes: int) -> Communicator:
    """Return a communicator that others can join at ``address``.

    Args:
        transport: What it is of.
        address: Local address that the generators can reach.
        buffer_bytes: Size of ipc's buffer.

    Raises:
        PushError: It cannot be opened now.
        UserError: ``address`` is not one of this machine's.
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
