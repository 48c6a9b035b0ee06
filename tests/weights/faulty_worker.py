"""A vLLM worker in which loading can be made to go wrong in the ways it has gone wrong, without any error."""

from typing import Any

from services.generator import checked_reload
from services.generator.staging_worker import StagingWorker

FAULTY_WORKER = "tests.weights.faulty_worker.FaultyWorker"
_prepack = checked_reload.prepack_tied_head


def _leave_as_it_is(model: Any) -> None:
    assert model is not None


class FaultyWorker(StagingWorker):
    """StagingWorker, with a switch."""

    def set_fault(self, fault: str) -> None:
        """Keep the old head of a model with tied embeddings (``old head``), or load rightly again (empty)."""
        checked_reload.prepack_tied_head = _leave_as_it_is if fault == "old head" else _prepack
