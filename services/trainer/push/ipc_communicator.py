"""The sending end on a GPU that trainer and generators share: weights are copied within its memory.

    trainer's buffer, exported --join body--> mapped by each worker
    chunk --copy--> buffer --gloo: "n bytes are there"--> copied out by each worker --gloo: "taken"--> next piece

NCCL refuses two ranks on one device. gloo carries a few bytes for each piece, and brings the deadlines, lifelines and
epochs that it already has. The driver's handles are exported as bytes and numbers (weight_places.py). Nothing is
pickled; torch's own way of sharing CUDA memory with another process would pickle them.
"""

import base64
import time
from typing import Any

import torch

from services.trainer.push.communicator import GlooCommunicator
from shared.errors import PushError
from shared.weights.weight_places import IpcBuffer

cuda: Any = torch.cuda  # partly untyped
_buffers: dict[tuple[int, int], torch.Tensor] = {}
"""(device, size) to the only buffer of this process. A killed replica never returns its mapping, and exported memory is
not free again until every mapping is returned."""


class IpcCommunicator:
    """Rank 0 of a gloo group, with a buffer on this thread's current device.

    Args:
        address: As for GlooCommunicator.
        buffer_bytes: Size of the buffer, which stays allocated.
    """

    is_streamed = True
    nccl_unique_id: str | None = None

    def __init__(self, *, address: str, buffer_bytes: int) -> None:
        self._control = GlooCommunicator(address=address)
        self._device = torch.device("cuda", cuda.current_device())
        self._buffer = _buffer(self._device, buffer_bytes)

    @property
    def port(self) -> int:
        """See Communicator."""
        return self._control.port

    def export(self) -> IpcBuffer:
        """Return a handle of the buffer for one process to map. torch counts the mappings that were returned."""
        storage: Any = self._buffer.untyped_storage()
        _, handle, storage_bytes, offset_bytes, counter, counter_offset, event, needs_event = storage._share_cuda_()
        return IpcBuffer(
            device_uuid=device_uuid(self._device),
            num_bytes=self._buffer.numel(),
            handle=base64.b64encode(handle).decode(),
            storage_bytes=storage_bytes,
            storage_offset_bytes=offset_bytes,
            ref_counter_handle=base64.b64encode(counter).decode(),
            ref_counter_offset=counter_offset,
            event_handle=base64.b64encode(event).decode(),
            event_sync_required=needs_event,
        )

    def rendezvous(self, *, world_size: int, timeout_s: float) -> None:
        """See Communicator."""
        self._control.rendezvous(world_size=world_size, timeout_s=timeout_s)

    def broadcast(self, chunk: torch.Tensor, *, timeout_s: float) -> None:
        """See Communicator. A chunk that is larger than the buffer is sent in pieces."""
        deadline = time.monotonic() + timeout_s
        size = self._buffer.numel()
        for start in range(0, chunk.numel(), size):
            piece = chunk[start : start + size]
            with cuda.device(self._device):
                self._buffer[: piece.numel()].copy_(piece)
                # Other processes do not see our streams.
                cuda.current_stream().synchronize()
            message = torch.tensor([piece.numel()])
            self._control.broadcast(message.view(torch.uint8), timeout_s=deadline - time.monotonic())
            self._control.confirm(timeout_s=deadline - time.monotonic())

    def finish(self, *, timeout_s: float) -> None:
        """See Communicator. ``broadcast`` has already waited."""

    def close(self) -> None:
        """See Communicator."""
        self._control.close()


def own_device_uuid() -> str | None:
    """Return the UUID of this thread's current GPU; None without a GPU."""
    return device_uuid(torch.device("cuda", cuda.current_device())) if torch.cuda.is_available() else None


def device_uuid(device: torch.device) -> str:
    """Return a GPU's UUID, which is the same in every process; device numbers are not."""
    return str(cuda.get_device_properties(device).uuid).removeprefix("GPU-")


def _buffer(device: torch.device, num_bytes: int) -> torch.Tensor:
    key = (device.index, num_bytes)
    if key not in _buffers:
        try:
            _buffers[key] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise PushError(
                f"{num_bytes} bytes of GPU memory for the weight push are not free; lower HEADRACE_ENGINE_ARGS' "
                "gpu_memory_utilization on the generator, which shares this GPU, or set vllm_enable_sleep_mode"
            ) from error
    return _buffers[key]
