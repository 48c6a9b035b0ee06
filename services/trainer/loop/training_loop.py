"""The trainer's loop: scored groups in, optimizer steps, weights and prompts out.

    [admit] --> prompts ... scored --> [choose a batch] --> advantages --> its steps --> [push] --> generators
       ^                                                   |                                |
       +------ settled groups make room for new ones ------+                checkpoint, then ack

    intake     groups: admission, arrivals, choice of batches, ledger         (trainer/intake/)
    outflow    weights: pushes and checkpoints                                (outflow.py)
    reporting  progress, steps and evaluations, for users                     (reporting.py)

Blocking: a batch waits for its groups and for stragglers (staleness.py). With one rank on a CPU, its gradients
are computed while the weights of the last batch are pushed, and its optimizer step waits for that push; otherwise the
gradients wait, too. weight_sender.py has the deadlines of a push. Groups are admitted, and evaluations begun, after the
push, so that no older weights sample them. If evaluations decide which checkpoint is the best, a batch also waits for
the evaluation and for the checkpoint of the weights that it measures. Nothing waits for watchers. While the loop waits,
admitted groups go on being sampled; in a pause none is admitted.

Pushes and checkpoints begin only between batches. A crash within a batch repeats it from its beginning, and a request
to end or pause the run waits for the end of the batch. Only SIGTERM does not wait for a push: a batch whose first step
would wait for it is given up, and the last checkpoint is written beside it (outflow.py).

A group is settled at the last step of its batch. Its entry is acked once a checkpoint with it is on disk; until then, a
crash repeats the training.
"""

import asyncio
import time
from typing import Any, Literal

import msgspec

from services.trainer.checkpoints.best_checkpoint import BestCheckpoint
from services.trainer.groups.ledger import RUN_ENDED, RUN_STOPPED, Ledger
from services.trainer.groups.schedule import RunLength
from services.trainer.intake.batch_builder import Batch, with_advantages
from services.trainer.intake.intake import Intake
from services.trainer.loop.batch_trainer import BatchTrainer
from services.trainer.loop.outflow import Outflow
from services.trainer.loop.reporting import Reporting
from services.trainer.policy.core_results import NonFiniteError
from services.trainer.policy.training_core import TrainingCore
from shared.beginning import RowCursor
from shared.run_options.run_config import RunConfig

Ending = Literal["finished", "stopped", "terminated"]


class TrainingLoop:
    """Drives one training run, from the first push to the last checkpoint.

    Args:
        core: The policy and its optimizer.
        trainer: Makes the optimizer steps of a batch.
        intake: Admits prompts, receives scored groups and chooses batches.
        outflow: Pushes the weights to generators and saves them in checkpoints.
        reporting: Reports progress, steps and evaluations to users.
        terminate: Set when this process is asked to end. The run itself goes on in the next trainer process.
        rows: The rows that the run began with, for its checkpoints.
        length: Optimizer steps of the run. A user's change is read between batches, and holds from the next one on.
        best: The best checkpoint so far; None if the run does not look for it.
    """

    def __init__(
        self,
        core: TrainingCore,
        config: RunConfig,
        *,
        trainer: BatchTrainer,
        intake: Intake,
        outflow: Outflow,
        reporting: Reporting,
        terminate: asyncio.Event,
        length: RunLength,
        rows: RowCursor,
        best: BestCheckpoint | None = None,
    ) -> None:
        self.best = best
        self.core = core
        self.intake = intake
        self.outflow = outflow
        self.reporting = reporting
        self._config = config
        self._trainer = trainer
        self._terminate = terminate
        self._length = length
        self._rows = rows
        self._new_max_steps: int | None = None

    @property
    def ledger(self) -> Ledger:
        """The record of how every admitted group ended: trained, or dropped with a reason."""
        return self.intake.ledger

    @property
    def stops_early(self) -> bool:
        """Whether the run ends before its last step, because its evaluations no longer improve."""
        return self.best is not None and self.best.stops_early and self._num_steps_left() > 0

    async def run(self) -> Ending:
        """Train until the last step, or until the run or this process is asked to end. Return how training ended."""
        async with asyncio.TaskGroup() as tasks:
            self.outflow.connect(tasks, state=self._state, then=self._admit)
            reporter = tasks.create_task(self.reporting.write_progress_for_ever(), name="progress reporter")
            try:
                ending = await self._train()
                await self.outflow.finish()
            except NonFiniteError:
                # This run will not be started again, so finish the checkpoint that is being written now. A new one
                # could have the weights of half a batch.
                await self.outflow.saver.finish_begun()
                raise
            finally:
                reporter.cancel()
        self.reporting.waits_for("")
        await self.reporting.write_progress()
        self._trainer.close()
        return ending

    async def _train(self) -> Ending:
        await self.intake.recover()
        await self._read_changes(may_go_on=True)  # the rank before may have made the last step
        while self._num_steps_left() > 0:
            batch = await self._wait_for_batch()
            if batch is None:
                return await self._end_early()
            await self._train_on(batch)
            if self._num_steps_left() > 0:  # the last checkpoint is written when the ledger is finished
                await self.outflow.save_if_due()
        self.reporting.waits_for("the last push and checkpoint")
        await self.outflow.wait_for_push()
        await self.outflow.begin_push_if_needed()  # again, if a generator failed
        if not await self.outflow.wait_for_push():
            return await self._end_early()
        self.intake.drop_the_rest(RUN_ENDED)
        await self.outflow.save()
        await self.intake.pause.end("it has made its last step")  # rewards may have paused it before its last batch
        return await self._finish_evaluation()

    async def _wait_for_batch(self) -> Batch | None:
        """Return the next batch, or None if the run or this process is to end."""
        while True:
            began_at = time.monotonic()
            await self._read_changes()
            num_steps_left = self._num_steps_left()
            if self._terminate.is_set() or self.intake.should_stop or self.stops_early:
                return None
            is_evaluation_due = self.intake.is_evaluation_due(self.core.policy_version)
            if is_evaluation_due and not await self.outflow.wait_for_push():
                continue
            if not self.outflow.is_pushing:
                await self.intake.make_up_losses()
                await self._admit()
            await self._evaluate()
            if self.stops_early:
                continue
            batch = await self._next_batch(num_steps_left)
            if batch.groups:
                return batch
            self.reporting.waits_for(self.outflow.waiting() or self.intake.waiting_for(batch))
            await self.intake.judge_arrivals(num_steps_left=num_steps_left)
            is_busy = self.outflow.is_pushing or self.outflow.saver.is_writing
            if not is_busy and self.intake.needs_checkpoint(lacks_room=self.reporting.log.lacks_room):
                await self.outflow.save()
            if self.intake.pause.by == "user":
                await self.outflow.save_in_pause()
            self.reporting.waited(time.monotonic() - began_at)

    async def _next_batch(self, num_steps_left: int) -> Batch:
        """Choose the next batch.

        If the run looks for its best checkpoint, the batch is empty during an evaluation: weights must not change.
        """
        if self.best is not None and self.intake.evaluations.is_running:
            return Batch((), waiting_for=self.intake.evaluations.waiting_for())
        return await self.intake.next_batch(policy_version=self.core.policy_version, num_steps_left=num_steps_left)

    async def _train_on(self, batch: Batch) -> None:
        """Make the steps of one batch. After the last step, settle its groups and begin the push of the weights.

        No step is made if this process is asked to end while the first step waits for the previous push.
        """
        self.reporting.waits_for("")
        await self.outflow.let_sleep()
        groups = with_advantages(batch, self._config)  # each reward relative to its group (advantages.py)
        for planned in await self._trainer.plan(groups, num_steps_left=self._num_steps_left()):
            trained = await self._trainer.step(planned)
            if trained is None:
                return
            if planned.is_last:
                self.intake.settle(batch, step=self.core.policy_version)
                await self._read_changes(may_go_on=True)
                await self.outflow.begin_push_if_needed()
            await self.reporting.step(groups, trained)

    async def _end_early(self) -> Ending:
        # Asked to stop, or stopping early, the run waits for the push, unless this process is asked to end meanwhile.
        if self._terminate.is_set() or not await self.outflow.wait_for_push():
            await self.outflow.save_before_end()
            return "terminated"
        is_stopped = self.intake.should_stop
        if self.best is not None and not is_stopped:
            await self.reporting.note(self.best.why_it_stops())
        self.intake.drop_the_rest(RUN_STOPPED if is_stopped else RUN_ENDED)
        await self.outflow.save()
        return "stopped" if is_stopped else "finished"

    async def _finish_evaluation(self) -> Ending:
        """Wait for the evaluation under way, and for the last step's evaluation if it is due."""
        while True:
            await self._read_changes()
            if self._terminate.is_set():
                return "terminated"
            await self.intake.make_up_losses()
            await self._evaluate()
            has_left = self.intake.has_evaluations_left(self.core.policy_version)
            if self.intake.should_stop and has_left and not self._length.total_steps:
                return "stopped"  # the run had nothing else to do
            if self.intake.should_stop or not has_left:
                return "finished"
            self.reporting.waits_for(self.intake.evaluations.waiting_for())
            await self.intake.receive()

    async def _evaluate(self) -> None:
        """Begin an evaluation that is due, and advance the one under way.

        Raises:
            UserError: The evaluation does not have the metric that decides which checkpoint is the best.
        """
        if note := self.intake.begin_evaluation(self.core.policy_version):
            await self.reporting.note(note)
        if self.best is not None and self.intake.evaluations.is_running:
            await self.outflow.save_for_evaluation()
        if not self.outflow.pushes.num_generators:
            self.intake.evaluations.hold_clock()
        result = await self.intake.advance_evaluation()
        if result is None:
            return
        if self.best is None:
            await self.reporting.evaluation(result)
            return
        await self.outflow.saver.finish()  # a line in the log says that its checkpoint is on disk
        await self.reporting.evaluation(result)
        if missing := self.best.num_missing(result.metrics):
            await self.reporting.note(
                f"the evaluation of step {result.step} has no score for {missing} of its prompts, so it counts neither "
                "for the best checkpoint nor for early stopping"
            )
        self.best.judge(result.metrics, step=result.step)
        self.outflow.saver.keep_best(self.best.step)

    async def _read_changes(self, *, may_go_on: bool = False) -> None:
        """Read external changes: requests to stop, pause or train longer, new generators, buried groups.

        With ``may_go_on``, a user may still raise ``max_steps`` of a run without steps left, because its end has not
        begun.
        """
        is_last_look = may_go_on and not self._num_steps_left()
        if is_last_look:
            await self.reporting.write_progress()  # it makes the run API refuse changes that this look would miss
        is_time_to_look = await self.intake.read_changes(at_once=is_last_look)  # else about twice a second
        if self._num_steps_left() or may_go_on:
            self._follow_max_steps(self.intake.max_steps)
        if self._num_steps_left():
            await self.intake.pause_or_resume()
        if is_time_to_look and not self._terminate.is_set():
            await self.outflow.begin_push_if_needed()  # a generator may have joined

    async def _admit(self) -> None:
        """Admit as many prompts as allowed. Called after a push, because before it, older weights would sample them."""
        if not (self._terminate.is_set() or self.intake.should_stop or self.stops_early):
            await self.intake.admit(num_steps_left=self._num_steps_left())

    def _num_steps_left(self) -> int:
        return self._length.num_left(self.core.policy_version)

    def _follow_max_steps(self, max_steps: int | None) -> None:
        """Apply a user's new ``max_steps``. If steps were left before, at least one more is made."""
        if max_steps != self._new_max_steps and max_steps is not None:
            num_more = min(1, self._num_steps_left())
            self._length.total_steps = max(max_steps - self._length.steps_before, self.core.policy_version + num_more)
        self._new_max_steps = max_steps

    def _state(self) -> dict[str, Any]:
        """Return the state of the loop that a checkpoint keeps beside the weights."""
        return {
            "ledger": self.ledger.to_json(),
            "num_tokens": self.reporting.seen_tokens,
            "considered_to": self.intake.scored.considered_to,
            "rows": msgspec.to_builtins(self._rows),
        }
