"""Receives pushed weights over NCCL, as a rank of an ``NcclGroup``, on the CUDA stream of the receiving thread.

After a deadline or an abort, a kernel that waits for a dead trainer may stay on the GPU; guarded_engine.py then ends
the process.
"""

import base64
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from shared.weights.nccl_group import NcclGroup, OnGpu

cuda: Any = torch.cuda  # partly untyped


class NcclWire:
    """Implements ChunkWire (weight_wires.py) with NCCL.

    Args:
        unique_id: NCCL's unique id of the rendezvous, in base64.
        timeout_s: Deadline of the rendezvous in seconds; the constructor blocks until every rank is there.
        is_given_up: Returns whether the push was given up; called while this rank waits for others.

    Raises:
        PushError: Not all ranks came in time, or the push was given up.
    """

    def __init__(
        self,
        *,
        unique_id: str,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        is_given_up: Callable[[], bool],
    ) -> None:
        self.device = device
        self._group = NcclGroup(base64.b64decode(unique_id), rank=rank, is_given_up=is_given_up)
        one = torch.zeros(1, device=device)
        try:
            self._group.enter(self._on_gpu(one), world_size=world_size, timeout_s=timeout_s)
        except BaseException:
            self.leave()
            raise

    def receive(self, chunk: torch.Tensor, *, deadline: float) -> None:
        """Fill ``chunk`` with the trainer's next broadcast.

        Raises:
            PushError: It did not come by ``deadline`` (monotonic seconds), NCCL failed, the push was given up, or this
                worker has left.
        """
        self._group.broadcast(self._on_gpu(chunk), timeout_s=deadline - time.monotonic())

    def leave(self) -> None:
        """Close the NCCL communicator in a thread, because that may take seconds. Calls that wait on it then fail."""
        # The abort may wait for seconds, and the calling loop also decodes.
        threading.Thread(target=self._group.close, name="leave NCCL", daemon=True).start()

    def _on_gpu(self, tensor: torch.Tensor) -> OnGpu:
        return OnGpu.of(tensor, stream=cuda.current_stream(self.device), event=cuda.Event)
