"""Loads a run's data, its model, and the state of its newest checkpoint.

load_inputs  record --> data sets, tokenizer, model
resume       newest valid checkpoint, or the run's beginning --> the model's weights, the loop's state
open_log     the run's log, without the steps that are going to be repeated
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from services.trainer.beginning.start import ContinuedRows, load_beginning
from services.trainer.checkpoints.checkpoint import load_into, newest_valid
from services.trainer.checkpoints.checkpoint_writer import remove_leftovers
from services.trainer.data.dataset import PromptDataset, open_eval_dataset, open_prompts
from services.trainer.data.prompt_encoder import PromptEncoder, load_tokenizer
from services.trainer.data.streamed_dataset import POSITIONS_FILE, StreamedDataset
from services.trainer.groups.ledger import Ledger
from services.trainer.groups.schedule import BatchShape, RunLength, total_steps
from services.trainer.intake.admission import PromptRows
from services.trainer.intake.scored_groups import BEGINNING
from services.trainer.policy.training_core import TrainingCore
from services.trainer.ranks.lead import Lead
from services.trainer.ranks.rank_group import make_core
from services.trainer.run_context import RunContext
from services.trainer.telemetry.run_log import RunLog
from shared.beginning import RowCursor
from shared.files.file_roots import FileRoots
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """The data sets, the tokenizer, the model and the length of a run."""

    rows: PromptDataset | StreamedDataset
    eval_rows: PromptDataset | None
    tokenizer: Any
    encoder: PromptEncoder
    core: TrainingCore
    length: RunLength

    def num_rows(self, config: RunConfig) -> int:
        """Return the rows in one pass over the data. With streamed data, all steps are one pass, as in transformers."""
        if isinstance(self.rows, PromptDataset):
            return len(self.rows)
        return max(1, BatchShape.of(config).groups(num_steps=self.length.steps_before + self.length.total_steps))

    def rows_left(self, cursor: RowCursor) -> PromptRows:
        """Return the rows for the run's groups: all rows, or the unused rows of the run that this one continues."""
        return self.rows if cursor == RowCursor() else ContinuedRows(self.rows, cursor)


@dataclass(frozen=True)
class LoopState:
    """The training loop's state in the checkpoint that the run resumed from, or at the beginning of the run."""

    ledger: Ledger
    num_tokens: int = 0
    considered_to: str = BEGINNING
    """Stream id up to which the scored stream had been considered."""
    step: int | None = None
    """Step of the checkpoint; None at the beginning of the run."""


def row_cursor(run: RunContext) -> RowCursor:
    """Return the position in the data at which a run begins: row 0, or after the rows of a run that it continues."""
    return RowCursor() if run.record.beginning is None else run.record.beginning.rows


async def load_inputs(run: RunContext, *, lead: Lead | None, data_roots: FileRoots | None) -> Inputs:
    """Open the data sets of a run, and load its tokenizer and its model."""
    config = run.config
    await run.starting("reading the data set")
    positions = run.files.run_dir / POSITIONS_FILE
    rows = await asyncio.to_thread(lambda: open_prompts(config, data_roots, positions=positions))
    eval_rows = await asyncio.to_thread(open_eval_dataset, config, data_roots)
    tokenizer = await asyncio.to_thread(load_tokenizer, config.model, config.model_revision)
    # A streamed data set does not know its length; the run then has max_steps.
    num_rows = len(rows) if isinstance(rows, PromptDataset) else 1
    steps = total_steps(config, num_rows=num_rows, steps_before=run.record.steps_before)
    await run.starting("loading the model")
    core = await asyncio.to_thread(lambda: make_core(config, total_steps=steps, lead=lead))
    encoder = PromptEncoder(tokenizer, chat_template_kwargs=config.chat_template_kwargs)
    return Inputs(rows, eval_rows, tokenizer, encoder, core, RunLength(steps, run.record.steps_before))


async def resume(run: RunContext, core: TrainingCore, *, data_roots: FileRoots | None) -> LoopState:
    """Load the newest valid checkpoint into the core (model and optimizer), and return the loop's state in it.

    Without one, load the source of ``resume_from_checkpoint`` if it is set, and return an empty state.
    """
    await asyncio.to_thread(lambda: remove_leftovers(run.files.checkpoints, incarnation=run.incarnation))
    checkpoint = await asyncio.to_thread(newest_valid, run.files.checkpoints)
    if checkpoint is None:
        await load_beginning(run, core, roots=data_roots)
        return LoopState(Ledger())
    await run.starting(f"loading the checkpoint of step {checkpoint.step}")
    await asyncio.to_thread(load_into, core, checkpoint)
    log.info("resumed from %s at step %d", checkpoint.path, checkpoint.step)
    kept = checkpoint.extra
    return LoopState(
        Ledger.from_json(kept["ledger"]), int(kept["num_tokens"]), str(kept["considered_to"]), checkpoint.step
    )


async def open_log(run: RunContext, core: TrainingCore, *, is_resumed: bool) -> RunLog:
    """Open the run's log, and remove the lines of steps that will be repeated. Watchers are informed of a resume."""
    run_dir = run.files.run_dir
    await run.room.write(
        lambda: (run_dir / "rollouts").mkdir(parents=True, exist_ok=True), what="its logs", where=run_dir
    )
    run_log = RunLog(run.redis, keys=run.keys, run_dir=run_dir, room=run.room)
    step = core.policy_version
    last = await run.room.write(lambda: run_log.cut_back_to(step), what="its logs", where=run_dir)
    if is_resumed or last > step:
        await run_log.event("log", {"message": resumed_in_words(step, last)})
    return run_log


def resumed_in_words(step: int, last: int) -> str:
    """Return a sentence for watchers of a run that resumes at ``step`` after it had made step ``last``."""
    resumed = f"the trainer was started again and resumed at step {step}"
    if last <= step:
        return resumed
    repeated = f"step {last} is" if last == step + 1 else f"steps {step + 1} to {last} are"
    return f"{resumed}; {repeated} trained again"
