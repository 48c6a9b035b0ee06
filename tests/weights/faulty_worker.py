"""A vLLM worker that can be made to load weights wrong without an error, in ways that have really occurred."""

from typing import Any

from services.generator.worker import model_load
from services.generator.worker.worker_transfer import WorkerExtension

FAULTY_WORKER = "tests.weights.faulty_worker.FaultyWorker"
_prepack = model_load.prepack_tied_head


def _leave_as_it_is(model: Any) -> None:
    assert model is not None


class FaultyWorker(WorkerExtension):
    """WorkerExtension with a switch for faults."""

    def set_fault(self, fault: str) -> None:
        """Keep the old head of a model with tied embeddings (``old head``), or load correctly again (empty)."""
        model_load.prepack_tied_head = _leave_as_it_is if fault == "old head" else _prepack
