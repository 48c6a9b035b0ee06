"""Opens the communicator of a transport: gloo, ipc or NCCL; for disk and simulated, one that sends nothing."""

import torch

from services.trainer.push.communicator import Communicator
from services.trainer.push.gloo_communicator import GlooCommunicator, IpcCommunicator, device_uuid
from services.trainer.push.membership import Abilities
from services.trainer.push.nccl_communicator import NcclCommunicator, nccl_version
from shared.control import Transport

BUFFER_BYTES = 16 * 1024 * 1024
"""Chunk size over gloo. Three chunks are packed, sent and staged in parallel. Memory of this size is reused, while
larger blocks are allocated anew."""
_GPU_BUFFER_BYTES = 256 * 1024 * 1024
"""Chunk size between GPUs, where each chunk costs a call and a wait."""


def open_communicator(transport: Transport, *, address: str, buffer_bytes: int) -> Communicator:
    """Return a communicator that generators can join at ``address``, with a buffer of this size for ipc.

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
            return Communicator()


def chunk_bytes(transport: Transport) -> int:
    """Return the default size of a chunk of weights over this transport, in bytes."""
    return _GPU_BUFFER_BYTES if transport in ("nccl", "ipc") else BUFFER_BYTES


def own_abilities() -> Abilities:
    """Return this process's torch and NCCL versions and its GPU, to compare with the generators'."""
    if not torch.cuda.is_available():
        return Abilities(str(torch.__version__), nccl_version=None)
    device = torch.device("cuda", torch.cuda.current_device())
    return Abilities(str(torch.__version__), nccl_version(), device_uuid(device))
