"""The sending end over NCCL, between GPUs: rank 0 of an ``NcclGroup``."""

import base64

import torch

from services.trainer.push.communicator import Communicator
from shared.weights.nccl_group import NcclGroup, unique_id


class NcclCommunicator(Communicator):
    """Rank 0, on this thread's current device.

    The unique id contains a port of NCCL's own. It is sent in the join body, over an authenticated route.
    """

    is_streamed = True

    def __init__(self) -> None:
        identifier = unique_id()
        self.nccl_unique_id = base64.b64encode(identifier).decode()
        self._group = NcclGroup(identifier, rank=0, device=torch.device("cuda", torch.cuda.current_device()))

    def rendezvous(self, *, world_size: int, timeout_s: float) -> None:
        """See Communicator."""
        self._group.enter(world_size=world_size, timeout_s=timeout_s)

    def broadcast(self, chunk: torch.Tensor, *, timeout_s: float) -> None:
        """See Communicator."""
        self._group.broadcast(chunk, timeout_s=timeout_s)

    def close(self) -> None:
        """See Communicator."""
        self._group.close()
