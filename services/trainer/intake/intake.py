"""Takes in the groups of one run: admits prompts, receives scored groups, chooses batches, and keeps the ledger.

    data set --admit--> prompts ... scored --judge_arrivals--> [waiting] --next_batch--> a batch --settle--> ledger
                           the streams of evaluations, too

A user's request, or rewards that fail, can pause the intake (run_pause.py). Groups that were buried or lost on the way
are noticed here: they are dropped or admitted again, so that no batch waits for them.
"""

import time

from services.trainer.groups.ledger import Ledger
from services.trainer.intake.admission import Admission
from services.trainer.intake.admission_pace import AdmissionPace
from services.trainer.intake.batch_builder import Batch, BatchBuilder
from services.trainer.intake.evaluation import EvaluationResult, Evaluations
from services.trainer.intake.external_changes import ExternalChanges
from services.trainer.intake.lost_writes import LostWrites
from services.trainer.intake.run_pause import RunPause
from services.trainer.intake.scored_groups import ScoredGroups

_RECEIVE_BLOCK_S = 0.2
_MAX_UNACKED_WHILE_PAUSED = 256
"""How many failed test groups may wait on the stream for the next checkpoint. In a pause no step is made, so a longer
queue gets a checkpoint of its own."""


class Intake:
    """Handles the prompt groups of one run, from admission to their outcome in the ledger.

    Args:
        ledger: Records the outcome of every group. Several other arguments share it.
        admission: Sends prompts.
        pace: Decides how many prompts to send.
        scored: The groups that came back.
        considered_to: Id of the last entry of the scored stream that the checkpoint's trainer had considered.
        batches: Chooses among the groups that came back.
        evaluations: The evaluations of the run, whose groups travel on the same streams.
        pause: Whether the run is paused.
        changes: Reads the changes that users and other services make.
        lost_writes: Notices groups that Redis has lost.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        admission: Admission,
        pace: AdmissionPace,
        scored: ScoredGroups,
        considered_to: str,
        batches: BatchBuilder,
        evaluations: Evaluations,
        pause: RunPause,
        changes: ExternalChanges,
        lost_writes: LostWrites,
    ) -> None:
        self.ledger = ledger
        self.pace = pace
        self.pause = pause
        self.scored = scored
        self.evaluations = evaluations
        self._admission = admission
        self._considered_to = considered_to
        self._batches = batches
        self._changes = changes
        self._lost_writes = lost_writes
        self.num_ahead = 0
        """Groups that could be sampled and scored while the newest batch is trained."""

    @property
    def should_stop(self) -> bool:
        """Whether a user asked the run to stop."""
        return self._changes.should_stop

    @property
    def max_steps(self) -> int | None:
        """The ``max_steps`` that a user set after the run was submitted; None if no user did."""
        return self._changes.wishes.max_steps

    async def recover(self) -> None:
        """Take in again the groups that an earlier incarnation had received and not settled."""
        recovered = await self.scored.recover(considered_to=self._considered_to)
        self._batches.failures.leave_out(self.scored.numbers())
        for waiting in recovered:
            self._batches.judge(waiting)

    async def read_changes(self, *, at_once: bool = False) -> bool:
        """Read requests, dead letters and begun groups, at most twice a second unless ``at_once``.

        Returns:
            Whether they were read.

        Raises:
            FencedError: A newer incarnation owns the run.
            StateLostError: Redis has lost the run.
        """
        return await self._changes.read(at_once=at_once)

    async def pause_or_resume(self) -> None:
        """Pause or resume the run, as users asked or as its rewards require."""
        await self.pause.begin_or_end(self._changes.wishes)

    async def make_up_losses(self) -> None:
        """Admit groups again that Redis lost when it was restarted."""
        await self._lost_writes.make_up()

    async def admit(self, *, num_steps_left: int) -> None:
        """Add as many prompts as the trainer needs to the stream; in a pause none, or a single test group.

        Raises:
            UserError: The data set has no usable rows.
        """
        here, paused_by = self.scored.numbers(), self.pause.by
        self._admission.leave_out(here)
        count = self.pace.num_to_admit(
            num_unadmitted=self._admission.num_unadmitted,
            num_waiting=len(here),
            num_steps_left=num_steps_left,
            paused_by=paused_by,
        )
        if not count:
            return
        numbers = await self._admission.admit(count)
        if paused_by == "rewards" and numbers:
            self._batches.failures.expect_test_group(numbers[-1])

    async def next_batch(self, *, policy_version: int, num_steps_left: int) -> Batch:
        """Return the batch that begins at ``policy_version``; an empty one if the batch must wait or a user paused."""
        if self.pause.by == "user":
            return Batch(())
        batch = self._choose(policy_version, num_steps_left)
        if batch.groups:
            # Sampling may have begun since the last read, so choose again on fresh data.
            await self._changes.read_started()
            batch = self._choose(policy_version, num_steps_left)
        if batch.groups:
            await self.scored.receive(block_s=None)  # to count the groups that have arrived meanwhile
            num_here = len(self.scored.numbers())
            self.num_ahead = self.pace.num_ahead(num_scored=num_here)
            self.pace.note_batch(num_spare=num_here - len(batch.groups))
        return batch

    def _choose(self, policy_version: int, num_steps_left: int) -> Batch:
        return self._batches.choose(
            policy_version=policy_version, started=self._changes.started, num_steps_left=num_steps_left
        )

    async def receive(self) -> None:
        """Read scored groups from their stream, and wait up to 0.2 s for the first."""
        await self.scored.receive(block_s=_RECEIVE_BLOCK_S)

    async def judge_arrivals(self, *, num_steps_left: int) -> None:
        """Keep or drop the next arrived group, or wait a moment for one. Continue while a batch lacks groups.

        Arrivals are handled one at a time, because the choice of a batch must not depend on how many arrived together.
        """
        if self.pause.by is not None:
            self.pace.note_pause()
        if not self._judge_next() and not await self.scored.receive(block_s=None):
            lacks_groups = self._batches.num_missing(num_steps_left=num_steps_left) > 0  # else it waits for stragglers
            began_at = time.monotonic()
            await self.receive()
            if lacks_groups:
                self.pace.note_wait(time.monotonic() - began_at)
        while self._batches.num_missing(num_steps_left=num_steps_left) and self._judge_next():
            pass

    def _judge_next(self) -> bool:
        waiting = self.scored.consider()
        if waiting is not None:
            self._batches.judge(waiting)
        return waiting is not None

    def waiting_for(self, batch: Batch) -> str:
        """Return what the run waits for, to follow "waiting for" in its status; in a pause, also how the pause ends."""
        return self.pause.waiting_for(batch.waiting_for, test_group_every_s=self.pace.test_group_every_s)

    def settle(self, batch: Batch, *, step: int) -> None:
        """Record the groups of a batch as trained. The weights contain them since optimizer step ``step``."""
        self._batches.take(batch, step=step)

    def drop_the_rest(self, reason: str) -> None:
        """Record all groups in flight as dropped, because the run is over."""
        for number in self.ledger.in_flight():
            self.ledger.record_dropped(number, reason)

    def needs_checkpoint(self, *, lacks_room: bool) -> bool:
        """Return whether to write a checkpoint now, so that the entries of settled groups can leave their stream.

        A checkpoint makes room in Redis if it ``lacks_room``. In a pause, which may last for days, one is also needed
        after 256 settled groups, such as failed test groups.
        """
        num_unacked = len(self.scored.settled())
        if lacks_room or self._admission.lacks_room:
            return num_unacked > 0
        return self.pause.by is not None and num_unacked >= _MAX_UNACKED_WHILE_PAUSED

    def is_evaluation_due(self, policy_version: int) -> bool:
        """Return whether an evaluation of this policy version should begin. False in a pause."""
        return self.evaluations.is_due(policy_version) and self.pause.by is None

    def begin_evaluation(self, policy_version: int) -> str:
        """Begin an evaluation if one is due, but not in a pause.

        Returns:
            A message if evaluations are late; empty otherwise.
        """
        return self.evaluations.begin(policy_version) if self.is_evaluation_due(policy_version) else ""

    async def advance_evaluation(self) -> EvaluationResult | None:
        """Receive groups of the evaluation under way, and send more prompts. Return its result at the end, else None.

        While a user pauses the run, no prompt is sent.
        """
        return await self.evaluations.go_on(self.scored.take_evaluated(), may_send=self.pause.by != "user")

    def has_evaluations_left(self, policy_version: int) -> bool:
        """Return whether an evaluation is under way or due."""
        return self.evaluations.is_running or self.is_evaluation_due(policy_version)
