"""Receives pushed weights from a trainer on the same GPU, through a CUDA buffer that the trainer shares.

The trainer's gloo_communicator.py has a diagram. The trainer's buffer is mapped from the fields of the join body
(IpcBuffer). Each field is checked, and none is unpickled. A chunk is copied before it is confirmed, so it belongs to
this process.
"""

import base64
import re
from typing import Any

import torch

from services.generator.worker.gloo_wire import GlooWire
from shared.control import IpcBuffer

cuda: Any = torch.cuda  # partly untyped
_REF_COUNTER = re.compile(rb"/torch_[0-9a-zA-Z_]{1,100}")
"""Names of torch's own shared memory, which torch opens by this name."""
_MIN_HANDLE_BYTES, _EVENT_HANDLE_BYTES = 64, 64


class IpcWire:
    """Implements ChunkWire (weight_wires.py) with the trainer's buffer, which this process has mapped.

    Args:
        gloo: The wire that signals when bytes are ready; ``leave`` leaves it too.
        buffer: The trainer's buffer, as returned by ``map_buffer``.
    """

    def __init__(self, gloo: GlooWire, buffer: torch.Tensor) -> None:
        self.device = buffer.device
        self._gloo = gloo
        self._buffer: torch.Tensor | None = buffer

    def leave(self) -> None:
        """Leave the gloo wire, and release the mapping of the trainer's buffer."""
        self._gloo.leave()
        self._buffer = None

    def receive(self, chunk: torch.Tensor, *, deadline: float) -> None:
        """Copy the trainer's next chunk from its buffer into ``chunk``, in pieces of at most the buffer's size.

        Raises:
            RuntimeError: It did not come by ``deadline`` (monotonic seconds), has another size than announced, the
                trainer gave up, or this worker has left.
        """
        start = 0
        while start < chunk.numel():
            message = torch.zeros(8, dtype=torch.uint8)
            self._gloo.receive(message, deadline=deadline)
            size = int(message.view(torch.int64))
            buffer = self._buffer
            if buffer is None:
                raise RuntimeError("this worker has left the communicator")
            if not 0 < size <= min(buffer.numel(), chunk.numel() - start):
                raise RuntimeError(
                    f"the trainer reports {size} bytes in its buffer, which does not match its announcement"
                )
            chunk[start : start + size].copy_(buffer[:size])
            if buffer.device.type == "cuda":
                # Another process writes the next piece to the same place, and does not wait for our streams.
                cuda.current_stream(buffer.device).synchronize()
            self._gloo.confirm(deadline=deadline)
            start += size


def map_buffer(place: IpcBuffer, device: torch.device) -> torch.Tensor:
    """Return another process's buffer as a uint8 tensor of this process.

    Raises:
        RuntimeError: The buffer is on another GPU, its fields do not describe a CUDA buffer, or the driver refuses it.
    """
    own_uuid = device_uuid(device)
    if place.device_uuid != own_uuid:
        raise RuntimeError(
            f"the trainer is on GPU {place.device_uuid} and this worker on {own_uuid}; ipc is for one GPU, "
            "set weight_transport: nccl"
        )
    if place.num_bytes > place.storage_bytes:
        raise RuntimeError(f"a buffer of {place.num_bytes} bytes cannot be in {place.storage_bytes} bytes of memory")
    handle, counter, event = (
        base64.b64decode(field) for field in (place.handle, place.ref_counter_handle, place.event_handle)
    )
    is_event = len(event) == _EVENT_HANDLE_BYTES or not place.event_sync_required
    if len(handle) < _MIN_HANDLE_BYTES or not is_event or _REF_COUNTER.fullmatch(counter) is None:
        raise RuntimeError("the handle in the join body does not belong to a CUDA buffer")
    with cuda.device(device):
        storages: Any = torch.UntypedStorage
        storage: Any = storages._new_shared_cuda(  # noqa: SLF001  the only name it has
            device.index,
            handle,
            place.storage_bytes,
            place.storage_offset_bytes,
            counter,
            place.ref_counter_offset,
            event,
            place.event_sync_required,
        )
        mapped: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
        buffer: torch.Tensor = mapped.set_(storage, 0, (place.num_bytes,), (1,))
        return buffer


def device_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in every process, unlike its index."""
    return str(cuda.get_device_properties(device).uuid).removeprefix("GPU-")
