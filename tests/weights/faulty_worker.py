"""A vLLM worker that can be made to load weights wrong without an error, in ways that have really occurred."""

from typing import Any

from services.generator.worker import model_load
from services.generator.worker.worker_transfer import WorkerExtension, WorkerTransfer

FAULTY_WORKER = "tests.weights.faulty_worker.FaultyWorker"
_prepack, _load = model_load.prepack_tied_head, WorkerTransfer.load


def _leave_as_it_is(model: Any) -> None:
    assert model is not None


def _have_no_memory(_: WorkerTransfer) -> None:
    raise RuntimeError("no memory on this worker")


class FaultyWorker(WorkerExtension):
    """WorkerExtension with a switch for faults."""

    def set_fault(self, fault: str) -> None:
        """Load wrong from now on, or correctly again if ``fault`` is empty.

        Args:
            fault: ``old head`` keeps the old head of a model with tied embeddings; ``no memory`` fails in the first
                worker.
        """
        model_load.prepack_tied_head = _leave_as_it_is if fault == "old head" else _prepack
        worker: Any = self
        fails = fault == "no memory" and worker.parallel_config.rank == 0
        setattr(WorkerTransfer, "load", _have_no_memory if fails else _load)  # noqa: B010  as type checkers want it
