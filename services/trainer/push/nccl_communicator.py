"""The trainer's end of the NCCL transport, between GPUs: rank 0 of an ``NcclGroup`` with the generators' workers."""

import base64
from typing import Any

import torch

from services.trainer.push.communicator import Communicator
from shared.weights.nccl_group import NcclGroup, OnGpu, unique_id

cuda: Any = torch.cuda  # partly untyped


def nccl_version() -> str | None:
    """Return the version of torch's NCCL, or None in a build without CUDA."""
    if torch.version.cuda is None:
        return None
    return ".".join(str(part) for part in cuda.nccl.version())


class NcclCommunicator(Communicator):
    """Rank 0 of an NCCL group with the generators' workers, on this thread's current GPU.

    The unique id contains a port of NCCL's own. It is sent in the join request, over an authenticated route.
    """

    is_streamed = True

    def __init__(self) -> None:
        identifier = unique_id()
        self.nccl_unique_id = base64.b64encode(identifier).decode()
        self._group = NcclGroup(identifier, rank=0)
        self._device = torch.device("cuda", torch.cuda.current_device())

    def rendezvous(self, *, world_size: int, timeout_s: float) -> None:
        """Enter the NCCL group, and wait until all generator workers have entered it."""
        with torch.cuda.device(self._device):
            one = torch.zeros(1, device=self._device)
            self._group.enter(_on_gpu(one), world_size=world_size, timeout_s=timeout_s)

    def broadcast(self, chunk: torch.Tensor, *, timeout_s: float) -> None:
        """Copy a chunk to the GPU if it is not there, and broadcast it over NCCL."""
        self._group.require_open()
        with torch.cuda.device(self._device):
            chunk = chunk.to(self._device)
            self._group.broadcast(_on_gpu(chunk), timeout_s=timeout_s)

    def close(self) -> None:
        """Abort the NCCL group, which makes blocked calls fail. May take seconds."""
        self._group.close()


def _on_gpu(tensor: torch.Tensor) -> OnGpu:
    return OnGpu.of(tensor, stream=cuda.current_stream(), event=cuda.Event)
