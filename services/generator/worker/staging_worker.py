"""Extends vLLM's worker by the methods that a push needs: ``worker_extension_cls`` of the engine's arguments.

vLLM adds this class to the bases of its own worker, without calling any constructor.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from services.generator.worker.worker_reports import ReportTo

if TYPE_CHECKING:
    from services.generator.worker.worker_transfer import WorkerTransfer

WORKER_EXTENSION = "services.generator.worker.staging_worker.StagingWorker"
_MOVES = frozenset({"enter", "receive", "progress", "leave", "forget", "load"})


class StagingWorker:
    """The methods that ``collective_rpc`` can call."""

    def headrace_push(self, move: str, arguments: dict[str, Any], report_to: Sequence[Any] | None = None) -> Any:
        """Make one move of worker_transfer.WorkerTransfer. If ``report_to`` is given, report the progress of the move
        there.
        """
        if move not in _MOVES:
            raise ValueError(f"a push has no move {move}")
        transfer = _transfer_of(self)
        if report_to is not None:
            transfer.report_to = ReportTo(*report_to)
        return getattr(transfer, move)(**arguments)

    def headrace_make_ready(self) -> None:
        """Make the buffers that vLLM 0.32 makes only in a warm-up; without a GPU it warms up only a few kinds of
        engines.

        All workers of a pipeline but the first receive the previous worker's activations into these buffers.
        """
        from vllm.distributed.parallel_state import get_pp_group

        runner: Any = getattr(self, "model_runner")  # noqa: B009  an attribute of vLLM's worker
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )


def _transfer_of(worker: Any) -> "WorkerTransfer":
    transfer: Any = getattr(worker, "_headrace_transfer", None)
    if transfer is None:
        from services.generator.worker import worker_transfer

        parallel = worker.parallel_config
        transfer = worker_transfer.WorkerTransfer(
            model=worker.get_model(),
            vllm_config=worker.vllm_config,
            device=worker.device,
            rank=parallel.data_parallel_index * parallel.world_size + parallel.rank,
        )
        worker._headrace_transfer = transfer  # noqa: SLF001  vLLM's object, our attribute
    found: WorkerTransfer = transfer
    return found
