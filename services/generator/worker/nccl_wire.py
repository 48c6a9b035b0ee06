"""The receiving end of the NCCL wire: vLLM's communicator, on the stream of the receiving thread.

NCCL has no deadlines, so this thread polls, gives up at its own deadline, and aborts the communicator when it leaves.
Even then, a kernel that waits for a dead trainer may stay on the GPU; weight_receiver.py then ends the process.
"""

import threading
import time
from typing import Any

import torch
from vllm.distributed.weight_transfer import nccl_common

cuda: Any = torch.cuda  # partly untyped
rendezvous: Any = nccl_common
_POLL_S = 0.0005


class NcclWire:
    """This worker's place in one communicator epoch. See weight_wires.ChunkWire.

    Args:
        unique_id: NCCL's unique id of the rendezvous, in base64.
    """

    def __init__(self, *, unique_id: str, rank: int, world_size: int, device: torch.device) -> None:
        self.device = device
        identifier = rendezvous.decode_nccl_unique_id(
            master_address=None, master_port=None, nccl_unique_id_b64=unique_id, ctx="the weight push"
        )
        self._group: Any = rendezvous.uid_init_process_group(identifier, rank, world_size, device)

    def receive(self, chunk: torch.Tensor, *, deadline: float) -> None:
        """See ChunkWire."""
        group = self._group
        if group is None:
            raise RuntimeError("this worker has left the communicator")
        stream = cuda.current_stream(self.device)
        group.broadcast(chunk, src=0, stream=stream)
        # Before it, the caller's copies out of the last chunk are queued.
        done = cuda.Event()
        done.record(stream)
        while not done.query():
            if self._group is None:
                raise RuntimeError("the push was given up")
            if time.monotonic() > deadline:
                raise RuntimeError("the trainer stopped sending")
            time.sleep(_POLL_S)

    def leave(self) -> None:
        """See ChunkWire."""
        group, self._group = self._group, None
        if group is not None:
            # It may wait seconds for the abort, and the calling loop also decodes.
            threading.Thread(target=group.destroy, name="leave NCCL", daemon=True).start()
