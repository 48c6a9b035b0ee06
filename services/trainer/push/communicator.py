"""The sending end of one communicator epoch: rank 0, over gloo or NCCL. ipc_communicator.py has the third wire.

    open (listens) --> rendezvous (waits for all other ranks) --> broadcast, broadcast, ... --> close

Every method except the constructor and ``close`` blocks and is called off the event loop. ``close`` may be called from
any thread at any time: every call blocked in this communicator, here or in a generator, then fails with an error.
"""

import base64
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from services.trainer.bound_store import listen_store
from services.trainer.push.nccl import NcclComm, unique_id
from services.trainer.torch_errors import first_line
from shared.errors import PushError, UserError
from shared.weights.weight_places import IpcBuffer

c10d: Any = torch.distributed  # a binding to C++ without complete types
_STORE_TIMEOUT_S = 30.0
_FIRST_POLL_S, _LAST_POLL_S, _POLL_SHARE = 0.00005, 0.005, 0.02
"""The pause between two polls grows by this share of the time waited so far, up to the second value."""
_abandoned: list[tuple[Any, Any]] = []
"""Groups with an operation that ends at its own deadline. Destroying such a group would wait for the operation."""


class Communicator(Protocol):
    """The interface of a transport that a push needs."""

    @property
    def is_streamed(self) -> bool:
        """Whether weights go through ``broadcast``. If not, the begin body says where the generators find them."""
        ...

    @property
    def port(self) -> int:
        """Port at which the other ranks reach this one."""
        ...

    @property
    def nccl_unique_id(self) -> str | None:
        """The unique id that the other ranks need for NCCL; None for other transports."""
        ...

    def export(self) -> IpcBuffer | None:
        """Return a handle of the memory that one more worker maps, for ipc; None for other transports."""
        ...

    def rendezvous(self, *, world_size: int, timeout_s: float) -> None:
        """Wait until every rank has entered.

        Raises:
            PushError: A rank did not enter within ``timeout_s``, or the communicator was closed.
        """
        ...

    def broadcast(self, chunk: torch.Tensor, *, timeout_s: float) -> None:
        """Send a uint8 tensor to all ranks. It may still be in transit on return, and must not change meanwhile.

        Raises:
            PushError: This chunk or the last one was not received within ``timeout_s``, a rank died, or the
                communicator was closed.
        """
        ...

    def finish(self, *, timeout_s: float) -> None:
        """Wait until the last broadcast was received.

        Raises:
            PushError: As in ``broadcast``.
        """
        ...

    def close(self) -> None:
        """Release all ranks, at once."""
        ...


class NoWire:
    """For transports without a rendezvous: sends nothing and has no ranks to release."""

    is_streamed = False
    port = 1
    nccl_unique_id: str | None = None

    def export(self) -> None:
        """See Communicator."""

    def rendezvous(self, *, world_size: int, timeout_s: float) -> None:
        """See Communicator."""

    def broadcast(self, chunk: torch.Tensor, *, timeout_s: float) -> None:
        """See Communicator."""

    def finish(self, *, timeout_s: float) -> None:
        """See Communicator."""

    def close(self) -> None:
        """See Communicator."""


class GlooCommunicator:
    """Rank 0 of a gloo group, separate from torch.distributed's default group.

    Args:
        address: Local address that the generators can reach. Store and connections are bound only to it.
    """

    is_streamed = True
    nccl_unique_id: str | None = None

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

    def export(self) -> None:
        """See Communicator."""

    def rendezvous(self, *, world_size: int, timeout_s: float) -> None:
        """See Communicator."""
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
        """See Communicator. While one chunk is sent, the next can be packed."""
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=max(timeout_s, 0.001))
        data = chunk.cpu()
        self.finish(timeout_s=timeout_s)
        self._start(lambda group: group.broadcast([data], options), what="a broadcast")

    def finish(self, *, timeout_s: float) -> None:
        """See Communicator. The deadline is the one given to the broadcast; ``timeout_s`` is not used."""
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
        """Wait until every rank has called its own ``confirm``.

        Raises:
            PushError: As in ``broadcast``.
        """
        options = c10d.AllreduceOptions()
        options.timeout = timedelta(seconds=max(timeout_s, 0.001))
        self.finish(timeout_s=timeout_s)
        self._start(lambda group: group.allreduce([torch.zeros(1, dtype=torch.int64)], options), what="a confirmation")
        self.finish(timeout_s=timeout_s)

    def _start(self, start: Callable[[Any], Any], *, what: str) -> None:
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
        """Drop group and store; both close their sockets. Lifelines are connections to the store (gloo_wire.py)."""
        self._is_closed = True
        sending, self._sending = self._sending, None
        if sending is not None:
            self._abandon(*sending[:2])
        self._group = None
        self._server = None


class NcclCommunicator:
    """Rank 0 of an NCCL communicator on this thread's current device; the wire of vLLM's NCCL engine.

    The unique id is sent in the join body, over an authenticated route: anyone who has it can enter.
    """

    is_streamed = True
    port = 1  # unused: NCCL opens a port of its own, and the unique id contains it

    def __init__(self) -> None:
        self._unique_id = unique_id()
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._comm: NcclComm | None = None
        self._is_closed = False

    @property
    def nccl_unique_id(self) -> str:
        """The 128 bytes that other ranks need to enter, in base64."""
        return base64.b64encode(self._unique_id).decode()

    def export(self) -> None:
        """See Communicator."""

    def rendezvous(self, *, world_size: int, timeout_s: float) -> None:
        """See Communicator. Ends with the one-element all-reduce that vLLM's communicator begins with."""
        deadline = time.monotonic() + timeout_s
        with torch.cuda.device(self._device):
            comm = NcclComm(self._unique_id, world_size=world_size)
            self._comm = comm
            if self._is_closed:  # closed before the communicator existed
                comm.abort()
                raise PushError("the communicator was closed while it was formed")
            comm.wait(deadline=deadline, what="entering NCCL")
            comm.all_reduce(torch.zeros(1, device=self._device), deadline=deadline)

    def broadcast(self, chunk: torch.Tensor, *, timeout_s: float) -> None:
        """See Communicator."""
        comm = self._comm
        if comm is None or self._is_closed:
            raise PushError("the communicator is closed")
        with torch.cuda.device(self._device):
            comm.broadcast(chunk.to(self._device), deadline=time.monotonic() + timeout_s)

    def finish(self, *, timeout_s: float) -> None:
        """See Communicator. ``broadcast`` has already waited."""

    def close(self) -> None:
        """Abort. NCCL then releases every rank it can reach."""
        self._is_closed = True
        if self._comm is not None:
            self._comm.abort()
