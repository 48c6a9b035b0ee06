"""An NCCL communicator in which no call blocks forever: calls torch's own copy of NCCL's C library.

    unique id --> enter --> broadcast, broadcast, ... --> close

``torch.distributed`` cannot share a bare unique id, and neither it nor vLLM's communicator can end a rank's wait for
others. This communicator is non-blocking (``ncclConfig_t.blocking = 0``): every call returns at once, and its
progress is polled up to a deadline. If a rank never enters, or dies in a broadcast, the others wait until then.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Self

from shared.errors import PushError

_UNIQUE_ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8, _FLOAT32 = 1, 7
_SUM = 0
_POLL_S = 0.0005
_CONFIG_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21400  # NCCL 2.14 added ``blocking``; later versions accept this shorter struct


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


@cache
def _library() -> ctypes.CDLL:
    """Return the NCCL that torch has loaded. A second copy in the process would not have its state."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise PushError(f"libnccl.so.2 is not loaded ({error}); install a CUDA build of torch, or use gloo") from error
    pointer = ctypes.c_void_p
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    library.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(pointer), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config),
    ]  # fmt: skip
    library.ncclCommGetAsyncError.argtypes = [pointer, ctypes.POINTER(ctypes.c_int)]
    library.ncclCommAbort.argtypes = [pointer]
    library.ncclBroadcast.argtypes = library.ncclAllReduce.argtypes = [
        pointer, pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, pointer, pointer,
    ]  # fmt: skip
    return library


def unique_id() -> bytes:
    """Return a new unique id. This process then listens for ranks that present it."""
    result = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(result)), "making a unique id")
    return bytes(result)


class OnGpu(NamedTuple):
    """A tensor on the GPU, and the stream on which NCCL reads or fills it."""

    address: int
    num_elements: int
    stream: int
    mark: Callable[[], Callable[[], bool]]
    """Records an event behind the work queued on the stream so far. The result says whether the GPU has reached it."""

    @classmethod
    def of(cls, tensor: Any, *, stream: Any, event: Callable[[], Any]) -> Self:
        """Describe a torch tensor on a CUDA stream. The caller keeps the tensor alive; ``event`` makes a CUDA event."""

        def mark() -> Callable[[], bool]:
            end = event()
            end.record(stream)
            is_reached: Callable[[], bool] = end.query
            return is_reached

        return cls(tensor.data_ptr(), tensor.numel(), stream.cuda_stream, mark)


class NcclGroup:
    """One rank of an NCCL communicator, on one GPU, which must be the calling thread's current device in every call.

    Args:
        identifier: The communicator's unique id. Anyone who has it can enter.
        rank: This rank. Rank 0 sends.
        is_given_up: Asked during every wait, which fails once it returns True.
    """

    def __init__(self, identifier: bytes, *, rank: int, is_given_up: Callable[[], bool] = lambda: False) -> None:
        self._identifier, self._rank = identifier, rank
        self._is_given_up = is_given_up
        self._handle = ctypes.c_void_p()
        self._lock = threading.Lock()
        """Held in every call with the handle, because an aborted one must not be used."""
        self._is_closed = False

    def enter(self, one: OnGpu, *, world_size: int, timeout_s: float) -> None:
        """Enter the communicator, and wait until every rank has. Ends with an all-reduce, which opens the connections.

        Args:
            one: A tensor of one float32, to be summed over all ranks.
            world_size: Number of ranks.
            timeout_s: Seconds for entering and the all-reduce together.

        Raises:
            PushError: Not all ranks came in time, NCCL failed, or the group was closed.
        """
        deadline = time.monotonic() + timeout_s
        handle = ctypes.c_void_p()
        identifier = _UniqueId.from_buffer_copy(self._identifier)
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0)
        code = _library().ncclCommInitRankConfig(
            ctypes.byref(handle), world_size, identifier, self._rank, ctypes.byref(config)
        )
        _check(code, "entering NCCL")
        with self._lock:
            self._handle = handle
            if self._is_closed:  # closed before the handle existed
                _library().ncclCommAbort(handle)
                raise PushError("the communicator was closed while it was formed")
        self._wait("entering NCCL", deadline=deadline)
        self._run("ncclAllReduce", one, (_FLOAT32, _SUM), deadline=deadline)

    def broadcast(self, chunk: OnGpu, *, timeout_s: float) -> None:
        """Send a tensor of uint8 as rank 0, or fill it as any other rank; wait until that is done.

        Raises:
            PushError: A rank did not take part in time, NCCL failed, or the group was closed.
        """
        self._run("ncclBroadcast", chunk, (_UINT8, 0), deadline=time.monotonic() + timeout_s)

    def require_open(self) -> None:
        """Raise PushError if the group was closed, or not entered."""
        if self._is_closed or not self._handle:
            raise PushError("the communicator is closed")

    def close(self) -> None:
        """Abort the communicator, which releases every rank that NCCL can reach. May block for seconds."""
        with self._lock:
            if self._handle and not self._is_closed:
                _library().ncclCommAbort(self._handle)
            self._is_closed = True

    def _wait(self, what: str, *, deadline: float) -> None:
        """Poll until the communicator is idle again. Raises PushError at the deadline, or if it fails or is closed."""
        while True:
            with self._lock:
                if self._is_closed or self._is_given_up():
                    raise PushError(f"{what} was aborted")
                state = ctypes.c_int(_SUCCESS)
                _check(_library().ncclCommGetAsyncError(self._handle, ctypes.byref(state)), what)
            _check(state.value, what)
            if state.value != _IN_PROGRESS:
                return
            if time.monotonic() > deadline:
                raise PushError(f"{what} did not finish in time")
            time.sleep(_POLL_S)

    def _run(self, function: str, operand: OnGpu, kind: tuple[int, int], *, deadline: float) -> None:
        """Start an operation on a stream, and wait until it is done."""
        pointer = ctypes.c_void_p(operand.address)
        with self._lock:
            self.require_open()
            code = getattr(_library(), function)(
                pointer, pointer, operand.num_elements, *kind, self._handle, ctypes.c_void_p(operand.stream)
            )
        _check(code, function)
        self._wait(function, deadline=deadline)
        is_done = operand.mark()
        while not is_done():
            self._wait(function, deadline=deadline)
            if time.monotonic() > deadline:
                raise PushError(f"{function} did not finish in time: another rank stopped taking part")
            time.sleep(_POLL_S)


def _check(code: int, what: str) -> None:
    if code not in (_SUCCESS, _IN_PROGRESS):
        raise PushError(f"{what} failed: NCCL says {_library().ncclGetErrorString(code).decode()}")
