"""The receiving end of the NCCL wire: vLLM's communicator, on the stream of the receiving thread.

The chunks are the same as in vLLM's packed broadcast, cut as in gloo_wire.py. NCCL has no deadlines, so this thread
polls, gives up at its own deadline, and aborts the communicator when it leaves. Even then, a kernel that waits for a
dead trainer may stay on the GPU; weight_receiver.py then ends the process.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import nccl_common

from services.generator.worker.gloo_wire import cut, num_bytes, unpack
from services.generator.worker.staged_weights import Spec

cuda: Any = torch.cuda  # partly untyped
rendezvous: Any = nccl_common
_POLL_S = 0.0005


class NcclWire:
    """This worker's place in one communicator epoch. See weight_wires.ChunkWire.

    Args:
        unique_id: NCCL's unique id of the rendezvous, in base64.
        rank: Rank of this worker in the communicator.
        world_size: Number of ranks in the communicator.
        device: The GPU.
    """

    def __init__(self, *, unique_id: str, rank: int, world_size: int, device: torch.device) -> None:
        self._device = device
        identifier = rendezvous.decode_nccl_unique_id(
            master_address=None, master_port=None, nccl_unique_id_b64=unique_id, ctx="the weight push"
        )
        self._group: Any = rendezvous.uid_init_process_group(identifier, rank, world_size, device)

    def receive_chunks(
        self, specs: Iterable[Spec], *, buffer_bytes: int, timeout_s: float
    ) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """See ChunkWire."""
        deadline = time.monotonic() + timeout_s
        for chunk_of in cut(specs, buffer_bytes):
            group = self._group
            if group is None:
                raise RuntimeError("this worker has left the communicator")
            chunk = torch.empty(sum(map(num_bytes, chunk_of)), dtype=torch.uint8, device=self._device)
            group.broadcast(chunk, src=0, stream=cuda.current_stream(self._device))
            self._wait(deadline)
            yield unpack(chunk, chunk_of)
            # The caller's copies out of the chunk are queued behind it.
            self._wait(deadline)

    def leave(self) -> None:
        """See ChunkWire."""
        group, self._group = self._group, None
        if group is not None:
            # It may wait seconds for the abort, and the calling loop also decodes.
            threading.Thread(target=group.destroy, name="leave NCCL", daemon=True).start()

    def _wait(self, deadline: float) -> None:
        """Wait for the work that is queued on this thread's stream."""
        done = cuda.Event()
        done.record(cuda.current_stream(self._device))
        while not done.query():
            if self._group is None:
                raise RuntimeError("the push was given up")
            if time.monotonic() > deadline:
                raise RuntimeError("the trainer stopped sending")
            time.sleep(_POLL_S)
