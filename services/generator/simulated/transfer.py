"""The way weights reach a simulated replica, as its receiving engine sees it."""

from typing import Any, Protocol

from services.generator.worker.worker_reports import Progress


class Transfer(Protocol):
    """The only worker of a simulated replica: the moves of worker_transfer.WorkerTransfer. Each returns at once."""

    def enter(self, where: dict[str, Any]) -> None:
        """Begin to enter a communicator."""
        ...

    def receive(self, what: dict[str, Any]) -> None:
        """Begin to receive."""
        ...

    def progress(self) -> Progress:
        """Return the progress of the current job."""
        ...

    def leave(self) -> None:
        """Leave the communicator."""
        ...

    def forget(self) -> None:
        """Discard the received weights."""
        ...

    def load(self) -> None:
        """Load the received weights."""
        ...
