"""Loads the checkpoint that a new run begins from into the core, which holds the run's model and optimizer.

    the run has no checkpoint yet --> check files --> core.begin_from --> push policy version 0 --> admit prompts

As in a resume, the core has the weights before the training loop is built, and the loop pushes them before it admits
the first prompt.
"""

import asyncio
import logging
from pathlib import Path

from services.trainer.checkpoints.checkpoint import checkpoint_paths
from services.trainer.checkpoints.manifest import find_damage
from services.trainer.data.dataset import PromptDataset, Row
from services.trainer.data.streamed_dataset import StreamedDataset, StreamedRow
from services.trainer.policy.training_core import TrainingCore
from services.trainer.run_context import RunContext
from services.trainer.run_files import RunFiles
from shared.beginning import Beginning, RowCursor
from shared.errors import UserError
from shared.files.file_roots import FileRoots

log = logging.getLogger(__name__)


class ContinuedRows:
    """A data set that continues where another run stopped: number 0 is the first row that the other run did not use.

    Args:
        rows: The data set.
        cursor: The rows that the other run did not use.
    """

    def __init__(self, rows: PromptDataset | StreamedDataset, cursor: RowCursor) -> None:
        self._rows = rows
        self._cursor = cursor

    def row_at(self, admission_number: int) -> Row | StreamedRow:
        """Return the row of this run's prompt group with ``admission_number``, which counts from 0 over all epochs."""
        return self._rows.row_at(self._cursor.row(admission_number))


async def load_beginning(run: RunContext, core: TrainingCore, *, roots: FileRoots | None) -> None:
    """Load the checkpoint that the run begins from into the core. Does nothing if the run begins from its ``model``.

    Raises:
        HeadraceError: The checkpoint is gone, damaged, or belongs to another model.
    """
    beginning = run.record.beginning
    if beginning is None:
        return
    await run.starting(f"loading {beginning.in_words()}")
    await asyncio.to_thread(_require_intact, beginning, files=run.files, roots=roots)
    directory = Path(beginning.directory)
    if beginning.weights_only:
        weights = directory / "model" if beginning.source == "checkpoint" else directory
        await asyncio.to_thread(core.take_weights, weights)
    else:
        await asyncio.to_thread(core.begin_from, directory)
    log.info("began from %s (%s)", beginning.in_words(), directory)


def _require_intact(beginning: Beginning, *, files: RunFiles, roots: FileRoots | None) -> None:
    directory = Path(beginning.directory)
    of = f"this run was to begin from {beginning.in_words()}"
    if not directory.is_relative_to(files.run_dir) and beginning.said.startswith("/") and roots is not None:
        roots.require(str(directory), field="resume_from_checkpoint", whole=True)
    if directory == files.beginning and not directory.is_dir() and checkpoint_paths(files.checkpoints):
        raise UserError(
            "every checkpoint of this run is damaged, and it did not keep the files that it began from, "
            f"{beginning.in_words()}, after its first one. Submit the run again"
        )
    if not directory.is_dir():
        raise UserError(
            f"{of}, but {directory} was deleted before the run had read it. Submit the run again from another "
            "checkpoint",
            field="resume_from_checkpoint",
        )
    if beginning.source == "checkpoint" and (damage := find_damage(directory)) is not None:
        raise UserError(
            f"{of}, which is damaged: {damage}. Submit the run again from another checkpoint",
            field="resume_from_checkpoint",
        )
