"""The trainer's end, rank 0, of a communicator to the generators' workers: the interface of all transports.

    open (listens) --> rendezvous (waits for all other ranks) --> broadcast, broadcast, ... --> close

Every method except the constructor and ``close`` blocks and is called off the event loop. ``close`` may be called from
any thread at any time: every call blocked in this communicator, here or in a generator, then fails with an error.
"""

import torch

from shared.control import IpcBuffer


class Communicator:
    """Base class of the gloo, ipc and NCCL communicators. For disk and simulated it is used as it is: it sends nothing.

    Attributes:
        is_streamed: Whether weights go through ``broadcast``. If not, the begin request says where the generators find
            them.
        port: Port at which the other ranks reach this one, over gloo or ipc.
        nccl_unique_id: The 128 bytes, in base64, that the other ranks need to enter NCCL; None for other transports.
    """

    is_streamed = False
    port = 1
    nccl_unique_id: str | None = None

    def export(self) -> IpcBuffer | None:
        """Return a handle with which one worker maps the shared GPU buffer of ipc; None for other transports."""

    def rendezvous(self, *, world_size: int, timeout_s: float) -> None:
        """Wait until every generator worker has entered the communicator.

        Raises:
            PushError: A rank did not enter within ``timeout_s``, or the communicator was closed.
        """

    def broadcast(self, chunk: torch.Tensor, *, timeout_s: float) -> None:
        """Send a uint8 tensor to all workers. It may still be in transit on return, and must not change meanwhile.

        Raises:
            PushError: This chunk or the last one was not received within ``timeout_s``, a rank died, or the
                communicator was closed.
        """

    def finish(self) -> None:
        """Wait until the last broadcast was received; needed only where ``broadcast`` does not wait.

        Raises:
            PushError: As in ``broadcast``; the last chunk's deadline still holds.
        """

    def close(self) -> None:
        """Close the communicator, without waiting for others. Calls blocked in it fail, here and in generators."""
