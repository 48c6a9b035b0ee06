"""Receives pushed weights over gloo. It needs only torch.

    rank 0, the trainer --- packed uint8 chunks, broadcast ---> ranks rank_offset .. of this replica's workers
                        --- lifeline, a silent connection --->  closed when the trainer gives up, or dies

Every wait has a deadline. The lifeline exists because gloo does not always wake a receiver whose sender has closed the
connection (seen when another rank had left before the first broadcast). Without it, all ranks would wait for the
deadline.
"""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from shared.service.daemon_thread import abandonable

c10d: Any = torch.distributed  # a binding to C++ without complete types

_FIRST_POLL_S, _LAST_POLL_S, _POLL_SHARE = 0.00005, 0.005, 0.02
"""The pause between two polls grows from the first to the last value, by this share of the time waited so far."""
_CONNECT_S = 10.0
"""Longest wait for a connection to the trainer. The other ranks wait longer, so only this one is blamed."""
_GIVEN_UP = "the trainer gave up the push, or died"
_abandoned: list[tuple[Any, Any]] = []
"""Groups with an operation that will end at its own deadline. Destroying such a group would wait for it."""


class GlooWire:
    """Implements ChunkWire (weight_wires.py) with gloo.

    Args:
        master_port: Port of the trainer's store.
        timeout_s: Deadline of the rendezvous in seconds; the constructor blocks until every rank is there.

    Raises:
        RuntimeError: Not all ranks came in time, the trainer gave up, or it cannot be reached in time.
    """

    device = torch.device("cpu")

    def __init__(self, *, master_address: str, master_port: int, rank: int, world_size: int, timeout_s: float) -> None:
        self._lifeline = _connect(master_address, master_port, timeout_s)
        self._group: Any = None
        timeout = timedelta(seconds=timeout_s)
        options = c10d.ProcessGroupGloo._Options()  # noqa: SLF001  the only name it has
        options._timeout = timeout  # noqa: SLF001
        own_address = str(self._lifeline.getsockname()[0])

        def enter() -> Any:
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname=own_address)]  # noqa: SLF001
            store = c10d.TCPStore(master_address, master_port, None, is_master=False, timeout=timeout)
            return c10d.ProcessGroupGloo(c10d.PrefixStore("weights", store), rank, world_size, options)

        # A little longer than its own deadline, so that its own error message is reported. But a store waits forever on
        # a network that drops all packets, and until its deadline for a trainer that has gone.
        until = time.monotonic() + timeout_s + 1.0

        def check() -> None:
            if _is_closed(self._lifeline):
                raise RuntimeError(_GIVEN_UP)
            if time.monotonic() > until:
                raise RuntimeError(f"the trainer did not answer within {timeout_s:.0f} s in the rendezvous")

        try:
            self._group = abandonable(enter, check, name="enter gloo")
        finally:
            if self._group is None:
                self._lifeline.close()

    def leave(self) -> None:
        """Close the connections. A call of ``receive`` or ``confirm`` that waits in another thread then fails."""
        self._group = None
        self._lifeline.close()

    def receive(self, chunk: torch.Tensor, *, deadline: float) -> None:
        """Fill ``chunk`` with the trainer's next broadcast.

        Raises:
            RuntimeError: It did not come by ``deadline`` (monotonic seconds), the trainer gave up, or this worker has
                left.
        """
        options = c10d.BroadcastOptions()
        options.timeout = _until(deadline)
        self._complete(lambda group: group.broadcast([chunk], options))

    def confirm(self, *, deadline: float) -> None:
        """Wait until every rank has called ``confirm``.

        Raises:
            RuntimeError: A rank did not call it by ``deadline`` (monotonic seconds), the trainer gave up, or this
                worker has left.
        """
        options = c10d.AllreduceOptions()
        options.timeout = _until(deadline)
        self._complete(lambda group: group.allreduce([torch.zeros(1, dtype=torch.int64)], options))

    def _complete(self, start: Callable[[Any], Any]) -> None:
        group = self._group
        if group is None:
            raise RuntimeError("this worker has left the communicator")
        work = start(group)
        began_at = time.monotonic()
        while not work.is_completed():
            if _is_closed(self._lifeline):
                _abandoned[:] = [(g, w) for g, w in _abandoned if not w.is_completed()]
                _abandoned.append((group, work))
                raise RuntimeError(_GIVEN_UP)
            time.sleep(min(_FIRST_POLL_S + _POLL_SHARE * (time.monotonic() - began_at), _LAST_POLL_S))
        work.wait()


def _until(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _connect(host: str, port: int, timeout_s: float) -> socket.socket:
    try:
        connection = socket.create_connection((host, port), timeout=min(timeout_s / 4, _CONNECT_S))
    except OSError as error:
        raise RuntimeError(f"the trainer cannot be reached at {host}:{port}: {error}") from error
    connection.setblocking(False)
    return connection


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
