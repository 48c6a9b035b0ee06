"""The trainer's loop: scored groups in, optimizer steps, weights and prompts out.

    [admit] --> prompts ... scored --> [choose a batch] --> its steps --> [push] --> generators
       ^                                      |                              |
       +--------- places given back ----------+-------- checkpoint, then ack

Blocking: a batch waits for its groups and for stragglers (staleness.py). A push waits for the generators, bounded by
push_timeout_s. Nothing waits for watchers or evaluations. Generation goes on meanwhile, within the admission bound,
except in pauses (run_pause.py).

Weights are pushed, and checkpoints written, only between batches. A crash within a batch repeats it from its beginning,
and a request to end or pause the run waits for the end of the batch. A group counts as trained when a checkpoint with
it in the ledger is on disk; only then is its entry acked.
"""

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from services.trainer.fence import check_not_fenced
from services.trainer.groups.ledger import Ledger
from services.trainer.loop.batch_builder import Batch, with_advantages
from services.trainer.loop.batch_trainer import BatchTrainer
from services.trainer.loop.external_changes import ExternalChanges
from services.trainer.loop.parts import Parts
from services.trainer.policy.core_results import NonFiniteError
from shared.redis.run_store import Progress, Waiting

log = logging.getLogger(__name__)

Ending = Literal["finished", "stopped", "terminated"]

_RECEIVE_BLOCK_S = 0.2
_REPORT_EVERY_S = 1.0
_MAX_UNACKED_WHILE_PAUSED = 256
"""How many failed probes may wait on the stream for the next checkpoint. In a pause no step is made, so a longer queue
gets a checkpoint of its own."""
RUN_STOPPED, RUN_ENDED = "run_stopped", "run_ended"


class TrainingLoop:
    """Drives one training run, from the first push to the last checkpoint.

    Args:
        parts: The objects it drives.
        terminate: Set when this process is asked to end. The run itself goes on in the next trainer process.
    """

    def __init__(self, parts: Parts, *, terminate: asyncio.Event) -> None:
        self._parts = parts
        self._terminate = terminate
        self._torch = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
        self._trainer = BatchTrainer(
            parts.core,
            parts.config,
            run_id=parts.keys.run_id,
            run_dir=parts.files.run_dir,
            in_hand=parts.in_hand,
            torch_thread=self._torch,
        )
        self._waiting = Waiting("work", "the first push")
        self._changes = ExternalChanges(
            parts.redis,
            keys=parts.keys,
            store=parts.store,
            incarnation=parts.incarnation,
            ledger=parts.ledger,
            scored=parts.scored,
            evaluations=parts.evaluations,
            log=parts.log,
        )

    @property
    def ledger(self) -> Ledger:
        """The outcome of every group so far."""
        return self._parts.ledger

    async def run(self) -> Ending:
        """Train until the last step, or until the run or this process is asked to end."""
        async with asyncio.TaskGroup() as tasks:
            reporter = tasks.create_task(self._report_for_ever(), name="progress reporter")
            try:
                ending = await self._train(tasks)
                await self._parts.saver.finish()
            except NonFiniteError:
                # This run will not be started again, so finish the checkpoint that is being written now.
                await self._parts.saver.finish()
                raise
            finally:
                reporter.cancel()
        self._waiting = Waiting("work", "")
        await self._write_progress()
        self._torch.shutdown(wait=False)
        return ending

    async def _train(self, tasks: asyncio.TaskGroup) -> Ending:
        parts = self._parts
        recovered = await parts.scored.recover(considered_to=parts.considered_to)
        parts.batches.failures.leave_out(parts.scored.numbers())
        for waiting in recovered:
            parts.batches.judge(waiting)
        while parts.core.policy_version < parts.total_steps:
            batch = await self._wait_for_batch(tasks)
            if batch is None:
                return await self._end_early(tasks)
            await self._train_on(batch)
            step, save_steps = parts.core.policy_version, parts.config.save_steps
            # The last checkpoint is written when the ledger is finished.
            if step // save_steps != parts.saver.saved_step // save_steps and step < parts.total_steps:
                await self._save(tasks)
        self._waiting = Waiting("work", "the last push and checkpoint")
        await self._push_if_needed()
        await self._finish_ledger(tasks, RUN_ENDED)
        return await self._finish_evaluation()

    async def _end_early(self, tasks: asyncio.TaskGroup) -> Ending:
        if self._terminate.is_set():
            if self._parts.core.policy_version != self._parts.saver.saved_step:
                await self._save(tasks)
            return "terminated"
        await self._finish_ledger(tasks, RUN_STOPPED)
        return "stopped"

    async def _finish_ledger(self, tasks: asyncio.TaskGroup, reason: str) -> None:
        for number in self._parts.ledger.in_flight():
            self._parts.ledger.record_dropped(number, reason)
        await self._save(tasks)

    async def _finish_evaluation(self) -> Ending:
        """Wait for the evaluation under way, and for the last step's evaluation if it is due."""
        while True:
            await self._look_around()
            if self._terminate.is_set():
                return "terminated"
            await self._parts.lost_writes.make_up()
            await self._evaluate()
            evaluations = self._parts.evaluations
            if self._changes.should_stop or not (evaluations.is_running or self._is_evaluation_due()):
                return "finished"
            self._waiting = Waiting("work", evaluations.waiting_for())
            await self._parts.scored.receive(block_s=_RECEIVE_BLOCK_S)

    async def _wait_for_batch(self, tasks: asyncio.TaskGroup) -> Batch | None:
        """Return the next batch, or None if the run or this process is to end."""
        parts = self._parts
        while True:
            began_at = time.monotonic()
            await self._look_around()
            if self._terminate.is_set() or self._changes.should_stop:
                return None
            await parts.pause.heed(self._changes.wishes)
            await parts.lost_writes.make_up()
            await self._admit()
            await self._evaluate()
            batch = await self._next_batch()
            if batch.groups:
                return batch
            waiting_for = parts.pause.waiting_for(batch.waiting_for, probe_every_s=parts.pace.probe_every_s)
            self._waiting = parts.pushes.waiting() or Waiting("work", waiting_for)
            # One arrival at a time: the choice must not depend on how many arrived together.
            if not self._consider_next():
                await parts.scored.receive(block_s=_RECEIVE_BLOCK_S)
            while parts.batches.num_missing(num_steps_left=self._num_steps_left()) and self._consider_next():
                pass
            await self._keep_the_stream_short(tasks)
            parts.report.waited(time.monotonic() - began_at, is_paused=parts.pause.by is not None)

    async def _next_batch(self) -> Batch:
        if self._parts.pause.by == "user":
            return Batch(())
        batch = self._choose()
        if batch.groups:
            # Sampling may have begun since the last look, so choose again on fresh data.
            await self._changes.read_started()
            batch = self._choose()
        return batch

    def _consider_next(self) -> bool:
        waiting = self._parts.scored.consider()
        if waiting is not None:
            self._parts.batches.judge(waiting)
        return waiting is not None

    def _choose(self) -> Batch:
        parts = self._parts
        return parts.batches.choose(
            policy_version=parts.core.policy_version,
            started=self._changes.started,
            num_steps_left=self._num_steps_left(),
        )

    def _num_steps_left(self) -> int:
        return self._parts.total_steps - self._parts.core.policy_version

    async def _look_around(self) -> None:
        """Read external changes: stop requests, new generators, dead letters, groups that were begun."""
        if await self._changes.look():
            await self._push_if_needed()

    async def _push_if_needed(self) -> None:
        parts = self._parts
        await parts.pushes.push_if_needed(parts.core.named_weights, policy_version=parts.core.policy_version)

    async def _admit(self) -> None:
        parts = self._parts
        parts.admission.leave_out(parts.scored.numbers())
        count = parts.pace.num_to_admit(
            num_unadmitted=parts.admission.num_unadmitted,
            num_waiting=len(parts.scored.numbers()),
            num_steps_left=self._num_steps_left(),
            paused_by=parts.pause.by,
        )
        if not count:
            return
        numbers = await parts.admission.admit(count)
        if parts.pause.by == "rewards":
            parts.batches.failures.expect_probe(numbers[-1])

    async def _evaluate(self) -> None:
        """Begin an evaluation that is due, and advance the one under way."""
        parts = self._parts
        arrived = parts.scored.take_evaluated()
        note = parts.evaluations.begin(parts.core.policy_version) if self._is_evaluation_due() else ""
        if note:
            await parts.report.note(note)
        result = await parts.evaluations.go_on(arrived)
        if result is not None:
            await parts.report.evaluation(result)

    def _is_evaluation_due(self) -> bool:
        """Return whether an evaluation is to begin; never while the run is paused."""
        return self._parts.evaluations.is_due(self._parts.core.policy_version) and self._parts.pause.by is None

    async def _train_on(self, batch: Batch) -> None:
        """Make the steps of one batch. With the last step, its groups are settled and its weights pushed."""
        parts = self._parts
        self._waiting = Waiting("work", "")
        if parts.config.vllm_enable_sleep_mode:
            # With max_staleness 0 there is nothing to generate until the next version.
            await parts.pushes.let_sleep()
        groups = with_advantages(batch, parts.config)
        for planned in await self._trainer.plan(groups, num_steps_left=self._num_steps_left()):
            trained = await self._trainer.step(planned)
            if planned.is_last:
                parts.batches.take(batch)
                parts.traces.trained(batch.groups, step=parts.core.policy_version)
                await self._push_if_needed()
                await self._look_around()
                if self._num_steps_left():
                    await parts.pause.heed(self._changes.wishes)
                await self._admit()
            # A trainer that was stopped for a while must not write into its successor's files.
            await check_not_fenced(parts.redis, parts.keys, parts.incarnation)
            await parts.report.step(groups, trained, parts.saver.metrics() | {"paused_s": parts.pause.total_s()})

    async def _save(self, tasks: asyncio.TaskGroup) -> None:
        """Copy the weights and the ledger for a checkpoint, which is written while training goes on."""
        await self._parts.saver.begin(tasks, self._torch, self._extra)

    async def _keep_the_stream_short(self, tasks: asyncio.TaskGroup) -> None:
        """Write a checkpoint so that failed probes leave their stream during a pause, which may last for days."""
        parts = self._parts
        if parts.pause.by is None or parts.saver.is_writing:
            return
        if len(parts.scored.settled()) >= _MAX_UNACKED_WHILE_PAUSED:
            await self._save(tasks)

    def _extra(self) -> dict[str, Any]:
        return {
            "ledger": self._parts.ledger.to_json(),
            "num_tokens": self._parts.report.seen_tokens,
            "considered_to": self._parts.scored.considered_to,
        }

    async def _report_for_ever(self) -> None:
        while True:
            await self._write_progress()
            await asyncio.sleep(_REPORT_EVERY_S)

    async def _write_progress(self) -> None:
        parts = self._parts
        step = parts.core.policy_version
        progress = Progress(
            step=step,
            max_steps=parts.total_steps,
            policy_version=step,
            waiting_for=self._waiting.says,
            waiting_kind=self._waiting.kind,
            groups_admitted=parts.ledger.admitted,
            groups_trained=parts.ledger.num_trained,
            groups_dropped=parts.ledger.dropped_by_reason(),
            num_generators=parts.pushes.num_generators,
            pushes=parts.pushes.num_pushes,
            pushes_confirmed=parts.pushes.num_confirmed,
            probes_failed=parts.pushes.num_probes_failed,
            num_left_out=parts.pushes.num_left_out,
            left_out=parts.pushes.left_out(),
            paused_s=parts.pause.total_s(),
            disk_full=parts.room.missing,
            updated_at_s=time.time(),
        )
        await parts.store.write_progress(parts.keys.run_id, progress)
        await parts.log.event("progress", {"step": progress.step, "waiting_for": progress.waiting_for})
