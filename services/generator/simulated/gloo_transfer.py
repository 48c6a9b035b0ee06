"""Receives weights over the real gloo wire into staging memory, to compute their checksum. No model loads them."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from services.generator.worker.gloo_wire import GlooWire
from services.generator.worker.staged_weights import StagedWeights
from services.generator.worker.weight_wires import receive_chunks
from services.generator.worker.worker_reports import IDLE, RECEIVING, Progress
from shared.weights.parameter_spec import Spec


class GlooTransfer:
    """Implements Transfer (receiving.py): receives weights over gloo, and keeps only their checksum.

    Blocking calls run in a thread.
    """

    def __init__(self) -> None:
        self._group: GlooWire | None = None
        self._buffer_bytes = 0
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._checksum: str | None = None
        self._is_given_up = False

    def enter(self, where: dict[str, Any]) -> None:
        """Begin to enter, in a thread, the communicator that the fields of JoinRequest in ``where`` describe."""

        def job() -> None:
            group = GlooWire(
                master_address=str(where["master_address"]),
                master_port=int(where["master_port"]),
                rank=int(where["rank_offset"]),
                world_size=int(where["world_size"]),
                timeout_s=float(where["timeout_s"]),
            )
            if self._is_given_up:
                group.leave()
                raise RuntimeError("the push was given up while the communicator was formed")
            self._group = group

        self._close()
        self._buffer_bytes = int(where["buffer_bytes"])
        self._start(job)

    def receive(self, what: dict[str, Any]) -> None:
        """Begin to receive the full set of parameters that ``what`` announces, in a thread.

        ``what`` holds the fields of BeginRequest.
        """
        specs = [
            Spec(name, getattr(torch, dtype_name), tuple(shape))
            for name, dtype_name, shape in zip(what["names"], what["dtype_names"], what["shapes"], strict=True)
        ]

        def job() -> None:
            if self._group is None:
                raise RuntimeError("weights were announced before this replica entered a communicator")
            staged = StagedWeights(specs)
            timeout_s = float(what["timeout_s"])
            for chunk in receive_chunks(self._group, specs, buffer_bytes=self._buffer_bytes, timeout_s=timeout_s):
                for name, tensor in chunk:
                    staged.put(name, tensor)
            self._checksum = staged.checksum()

        self._checksum = None
        self._start(job)

    def progress(self) -> Progress:
        """Return whether the thread is busy, the failure of its last job, and the checksum of the received weights."""
        is_busy = self._thread is not None and self._thread.is_alive()
        return Progress(RECEIVING if is_busy else IDLE, self._failure, self._checksum)

    def leave(self) -> None:
        """Leave the communicator. A job in progress fails."""
        self._is_given_up = True
        self._close()

    def forget(self) -> None:
        """Forget the checksum of the received weights, so that ``load`` refuses them."""
        self._checksum = None

    def load(self) -> None:
        """Check that a complete set of weights was received. No model loads them.

        Raises:
            RuntimeError: The set is not complete.
        """
        if self._checksum is None:
            raise RuntimeError("there are no complete weights to load")

    def _start(self, job: Callable[[], None]) -> None:
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("this replica is still receiving")
        self._failure, self._is_given_up = None, False

        def run() -> None:
            try:
                job()
            except (RuntimeError, ValueError, OSError) as error:
                self._failure = str(error) or type(error).__name__

        self._thread = threading.Thread(target=run, name="simulated weight push", daemon=True)
        self._thread.start()

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave()
