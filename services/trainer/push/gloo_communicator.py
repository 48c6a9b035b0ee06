"""The trainer's end of the gloo and ipc transports. ipc has a shared GPU buffer for the bytes, and gloo for signals.

    gloo  chunk --broadcast--> every worker

    ipc   trainer's buffer, exported --join request--> mapped by each worker
          chunk --copy--> buffer --gloo: "n bytes are there"--> copied out by each worker --gloo: "taken"--> next piece

ipc is for a GPU that trainer and generators share: NCCL refuses two ranks on one device. gloo carries a few bytes for
each piece, and brings the deadlines, the detection of lost processes and the epochs that it already has. The driver's
handles are exported as bytes and numbers (IpcBuffer). Nothing is pickled; torch's own way of sharing CUDA memory with
another process would pickle them.
"""

import base64
import contextlib
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from services.trainer.bound_store import listen_store
from services.trainer.push.communicator import Communicator
from services.trainer.torch_errors import first_line
from shared.control import IpcBuffer
from shared.errors import PushError, UserError

c10d: Any = torch.distributed  # a binding to C++ without complete types
cuda: Any = torch.cuda  # partly untyped
_STORE_TIMEOUT_S = 30.0
_FIRST_POLL_S, _LAST_POLL_S, _POLL_SHARE = 0.00005, 0.005, 0.02
"""The pause between two polls grows by this share of the time waited so far, up to the second value."""
_EXPANDABLE = "expandable_segments"
_abandoned: list[tuple[Any, Any]] = []
"""Groups with an operation that ends at its own deadline. Destroying such a group would wait for the operation."""
_buffers: dict[tuple[int, int], torch.Tensor] = {}
"""(device, size) to the only buffer of this process. A killed replica never returns its mapping, and exported memory is
not free again until every mapping is returned."""


class GlooCommunicator(Communicator):
    """Rank 0 of a gloo group, separate from torch.distributed's default group.

    Args:
        address: Local address that the generators can reach. Store and connections are bound only to it.
    """

    is_streamed = True

    def __init__(self, *, address: str) -> None:
        self._address = address
        try:
            self._server, self.port = listen_store(address, timeout_s=_STORE_TIMEOUT_S)
        except OSError as error:
            raise UserError(f"the trainer cannot listen on {address} for the weight push: {error}") from error
        except RuntimeError as error:
            raise PushError(f"the communicator cannot be opened on {address}: {first_line(error)}") from error
        self._group: Any = None
        self._sending: tuple[Any, Any, str] | None = None
        """The group, its unfinished operation, and the operation's name."""
        self._is_closed = False

    def rendezvous(self, *, world_size: int, timeout_s: float) -> None:
        """Form the gloo group over the store at ``port``, and wait until all generator workers are in it."""
        timeout = timedelta(seconds=timeout_s)
        try:
            # A second connection to our own server: when close() drops the server, this connection is cut and we wake
            # up.
            store = c10d.TCPStore(self._address, self.port, None, is_master=False, timeout=timeout)
            options = c10d.ProcessGroupGloo._Options()  # noqa: SLF001  the only name it has
            options._timeout = timeout  # noqa: SLF001
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=self._address)]  # noqa: SLF001
            self._group = c10d.ProcessGroupGloo(c10d.PrefixStore("weights", store), 0, world_size, options)
        except RuntimeError as error:
            raise PushError(f"not every generator entered the communicator: {first_line(error)}") from error
        if self._is_closed:
            self._group = None
            raise PushError("the communicator was closed while it was formed")

    def broadcast(self, chunk: torch.Tensor, *, timeout_s: float) -> None:
        """Wait until the last chunk was received, then start to send this one. The next can be packed meanwhile."""
        options = c10d.BroadcastOptions()
        options.timeout = timedelta(seconds=max(timeout_s, 0.001))
        data = chunk.cpu()
        self._start(lambda group: group.broadcast([data], options), what="a broadcast")

    def finish(self) -> None:
        """Poll until the last broadcast was received, and raise PushError if it failed or ``close`` was called."""
        sending, self._sending = self._sending, None
        if sending is None:
            if self._is_closed:
                raise PushError("the communicator is closed")
            return
        group, work, what = sending
        del sending
        began_at = time.monotonic()
        try:
            while not work.is_completed():
                if self._is_closed:
                    self._abandon(group, work)
                    raise PushError(f"the communicator was closed in the middle of {what}")
                time.sleep(min(_FIRST_POLL_S + _POLL_SHARE * (time.monotonic() - began_at), _LAST_POLL_S))
            work.wait()
        except RuntimeError as error:
            raise PushError(f"{what} broke off: {first_line(error)}") from error
        finally:
            # The error's traceback keeps this frame; if it kept the group, close() would not close its sockets.
            del group, work

    def confirm(self, *, timeout_s: float) -> None:
        """Wait until every rank has called its own ``confirm``. Raises PushError as ``broadcast`` does."""
        options = c10d.AllreduceOptions()
        options.timeout = timedelta(seconds=max(timeout_s, 0.001))
        self._start(lambda group: group.allreduce([torch.zeros(1, dtype=torch.int64)], options), what="a confirmation")
        self.finish()

    def _start(self, start: Callable[[Any], Any], *, what: str) -> None:
        self.finish()
        group = self._group
        if group is None:
            raise PushError("the communicator is closed")
        try:
            self._sending = (group, start(group), what)
        except RuntimeError as error:
            raise PushError(f"{what} broke off: {first_line(error)}") from error
        finally:
            del group  # as in finish
        if self._is_closed:
            self.close()

    def _abandon(self, group: Any, work: Any) -> None:
        _abandoned[:] = [(g, w) for g, w in [*_abandoned, (group, work)] if not w.is_completed()]

    def close(self) -> None:
        """Drop group and store. Workers watch a connection to the store, which closes at once (gloo_wire.py)."""
        self._is_closed = True
        sending, self._sending = self._sending, None
        if sending is not None:
            self._abandon(*sending[:2])
        self._group = None
        self._server = None


class IpcCommunicator(GlooCommunicator):
    """Copies chunks to a shared buffer on this thread's current GPU, and signals the workers over a gloo group.

    Args:
        buffer_bytes: Size of the buffer, which stays allocated.
    """

    def __init__(self, *, address: str, buffer_bytes: int) -> None:
        super().__init__(address=address)
        self._device = torch.device("cuda", cuda.current_device())
        self._buffer = _buffer(self._device, buffer_bytes)

    def export(self) -> IpcBuffer:
        """Return a handle with which one process maps the buffer. torch counts the mappings that still exist."""
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

    def broadcast(self, chunk: torch.Tensor, *, timeout_s: float) -> None:
        """Copy a chunk to the buffer, in pieces if it is larger, and wait until every worker has taken each piece."""
        deadline = time.monotonic() + timeout_s
        size = self._buffer.numel()
        for start in range(0, chunk.numel(), size):
            piece = chunk[start : start + size]
            with cuda.device(self._device):
                self._buffer[: piece.numel()].copy_(piece)
                # Other processes do not see our streams.
                cuda.current_stream().synchronize()
            message = torch.tensor([piece.numel()])
            super().broadcast(message.view(torch.uint8), timeout_s=deadline - time.monotonic())
            self.confirm(timeout_s=deadline - time.monotonic())


def device_uuid(device: torch.device) -> str:
    """Return a GPU's UUID, which is the same in every process; device numbers are not."""
    return str(cuda.get_device_properties(device).uuid).removeprefix("GPU-")


@contextlib.contextmanager
def _without_expandable_segments() -> Generator[None]:
    """Have torch allocate memory that other processes can map, as long as the block runs.

    Expandable segments, which the user may have chosen in PYTORCH_ALLOC_CONF, can only be mapped where the kernel
    allows pidfd_getfd, and it does not in most containers.
    """
    untyped: Any = torch  # partly
    binding = untyped._C  # noqa: SLF001  the only name it has
    chosen: str = binding._accelerator_getAllocatorSettings()  # noqa: SLF001
    if _EXPANDABLE not in chosen:
        yield
        return
    others = [one for one in chosen.split(",") if one.strip() and one.strip().partition(":")[0] != _EXPANDABLE]
    configure: Any = binding._accelerator_setAllocatorSettings  # noqa: SLF001
    configure(",".join([*others, f"{_EXPANDABLE}:False"]))
    try:
        yield
    finally:
        configure(chosen)


def _buffer(device: torch.device, num_bytes: int) -> torch.Tensor:
    key = (device.index, num_bytes)
    if key not in _buffers:
        try:
            with _without_expandable_segments():
                _buffers[key] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise PushError(
                f"{num_bytes} bytes of GPU memory for the weight push are not free; lower HEADRACE_ENGINE_ARGS' "
                "gpu_memory_utilization on the generator, which shares this GPU, or set vllm_enable_sleep_mode"
            ) from error
    return _buffers[key]
