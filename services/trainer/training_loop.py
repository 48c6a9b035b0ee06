"""The trainer's loop: scored groups in, optimizer steps, weights and prompts out.

    [admit] --> prompts ... scored --> [choose] --> accumulate, step --> [push] --> generators
       ^                                   |                                |
       +------- places given back ---------+------ every save_steps: checkpoint, then ack

Who blocks whom: a step waits for groups_per_step scored groups and for stragglers (staleness.py); a push waits for the
generators, bounded by push_timeout_s; nothing waits for watchers. Generation goes on meanwhile, within the admission
bound. A group counts as trained when a checkpoint with it in the ledger is on disk; only then is its entry acked.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from services.trainer.admission import Admission
from services.trainer.admission_pace import AdmissionPace
from services.trainer.batch_builder import Batch, BatchBuilder
from services.trainer.checkpoint import save_checkpoint
from services.trainer.ledger import DEAD_LETTER, Ledger
from services.trainer.policy_core import PolicyCore
from services.trainer.push_log import PushLog
from services.trainer.reconcile import check_not_fenced
from services.trainer.run_files import RunFiles
from services.trainer.run_log import RunLog
from services.trainer.scored_groups import ScoredGroups
from services.trainer.step_metrics import rollout_metrics, rollout_rows
from services.trainer.train_rows import train_rows
from shared.keys import RunKeys
from shared.messages import Stamp
from shared.redis_connection import Redis, patiently
from shared.run_config import RunConfig
from shared.run_store import Progress, RunStore

log = logging.getLogger(__name__)

Ending = Literal["finished", "stopped", "terminated"]
_ResultT = TypeVar("_ResultT")

_LOOK_AROUND_EVERY_S = 0.5
_RECEIVE_BLOCK_S = 0.2
RUN_STOPPED, RUN_ENDED = "run_stopped", "run_ended"


@dataclass
class Parts:
    """What the loop drives; made by rank.py."""

    redis: Redis
    keys: RunKeys
    config: RunConfig
    store: RunStore
    core: PolicyCore
    ledger: Ledger
    admission: Admission
    pace: AdmissionPace
    scored: ScoredGroups
    batches: BatchBuilder
    pushes: PushLog
    files: RunFiles
    log: RunLog
    tokenizer: Any
    replica_id: str
    epoch: int
    total_steps: int
    trained_tokens: int


class TrainingLoop:
    """One training rank's life from its first push to its last checkpoint.

    Args:
        parts: What it drives.
        terminate: Set when this process was asked to end; the run itself goes on in its successor.
    """

    def __init__(self, parts: Parts, *, terminate: asyncio.Event) -> None:
        self._parts = parts
        self._terminate = terminate
        self._torch = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
        self._waiting_for = "the first push"
        self._last_dead_letter = "-"
        self._looked_around_at = 0.0
        self._should_stop = False
        self._started: dict[int, int] = {}
        self._arrived_tokens = 0
        self._step_began_at = time.monotonic()
        self._trained_tokens = parts.trained_tokens
        self._saved_step = parts.core.policy_version

    @property
    def ledger(self) -> Ledger:
        """What became of every group so far."""
        return self._parts.ledger

    async def run(self) -> Ending:
        """Train until the last step, or until the run or this process is asked to end."""
        async with asyncio.TaskGroup() as tasks:
            reporter = tasks.create_task(self._report_for_ever(), name="progress reporter")
            try:
                ending = await self._train()
            finally:
                reporter.cancel()
        self._waiting_for = ""
        await self._write_progress()
        self._torch.shutdown(wait=False)
        return ending

    async def _train(self) -> Ending:
        parts = self._parts
        while parts.core.policy_version < parts.total_steps:
            batch = await self._wait_for_batch()
            if batch is None:
                return await self._end_early()
            await self._step(batch)
        self._waiting_for = "the last push and checkpoint"
        await self._push_if_needed()
        await self._finish_ledger(RUN_ENDED)
        return "finished"

    async def _end_early(self) -> Ending:
        if self._terminate.is_set():
            await self._save()
            return "terminated"
        await self._finish_ledger(RUN_STOPPED)
        return "stopped"

    async def _finish_ledger(self, reason: str) -> None:
        for number in self._parts.ledger.in_flight():
            self._parts.ledger.record_dropped(number, reason)
        await self._save(always=True)

    async def _wait_for_batch(self) -> Batch | None:
        """Return the next batch, or None if the run or this process shall end."""
        parts = self._parts
        while True:
            await self._look_around()
            if self._terminate.is_set() or self._should_stop:
                return None
            await self._admit()
            for waiting in await parts.scored.receive(block_s=_RECEIVE_BLOCK_S):
                self._arrived_tokens += sum(r.completion_ids().size for r in waiting.group.rollouts)
                parts.batches.judge(waiting)
            batch = parts.batches.choose(policy_version=parts.core.policy_version, started=self._started)
            if batch.groups:
                # Sampling may have begun since the last look; decide on what is true now.
                await self._read_started()
                batch = parts.batches.choose(policy_version=parts.core.policy_version, started=self._started)
            if batch.groups:
                return batch
            self._waiting_for = parts.pushes.waiting_for() or parts.pace.waiting_for(batch.waiting_for)

    async def _look_around(self) -> None:
        """See what others did: stop requests, new generators, dead letters, sampling begun."""
        if time.monotonic() - self._looked_around_at < _LOOK_AROUND_EVERY_S:
            return
        self._looked_around_at = time.monotonic()
        await check_not_fenced(self._parts.redis, self._parts.keys, self._parts.epoch)
        self._should_stop = await self._parts.store.should_stop(self._parts.keys.run_id)
        await self._push_if_needed()
        await self._note_dead_letters()
        await self._read_started()

    async def _push_if_needed(self) -> None:
        parts = self._parts
        await parts.pushes.push_if_needed(parts.core.named_weights, policy_version=parts.core.policy_version)

    async def _read_started(self) -> None:
        redis, key = self._parts.redis, self._parts.keys.started
        found = await patiently(lambda: redis.hgetall(key), what="reading what is being sampled", timeout_s=60)
        self._started = {int(number): int(version) for number, version in found.items()}

    async def _note_dead_letters(self) -> None:
        redis, key = self._parts.redis, self._parts.keys.dead
        after = self._last_dead_letter
        letters = await patiently(lambda: redis.xrange(key, min=after), what="reading dead letters", timeout_s=60)
        waiting = self._parts.scored.numbers()
        for entry_id, fields in letters:
            self._last_dead_letter = f"({entry_id.decode()}"
            label = fields.get(b"group_id", b"").decode(errors="replace")
            if label.isdecimal() and int(label) < self._parts.ledger.admitted and int(label) not in waiting:
                self._parts.ledger.record_dropped(int(label), DEAD_LETTER)
                await self._parts.log.event(
                    "log", {"message": f"group {label} was buried: {fields.get(b'reason', b'').decode()}"}
                )

    async def _admit(self) -> None:
        parts = self._parts
        count = parts.pace.num_to_admit(
            num_unadmitted=parts.admission.num_unadmitted,
            num_waiting=len(parts.scored.numbers()),
            num_steps_left=parts.total_steps - parts.core.policy_version,
            unscorable_in_a_row=parts.batches.unscorable_in_a_row,
        )
        if count:
            await parts.admission.admit(count)

    async def _step(self, batch: Batch) -> None:
        parts = self._parts
        policy_version = parts.core.policy_version
        self._waiting_for = ""
        rows = [row for group in batch.groups for row in train_rows(group, parts.config)]
        began_at = time.monotonic()
        await self._in_torch_thread(lambda: parts.core.accumulate(rows))
        stepped = await self._in_torch_thread(parts.core.step)
        train_s = time.monotonic() - began_at
        parts.batches.take(batch)
        await self._push_if_needed()
        await self._admit()
        metrics = rollout_metrics(batch.groups, policy_version=policy_version) | stepped.metrics()
        await self._log_step(batch, metrics, train_s=train_s, num_tokens=sum(int(r.loss_mask.sum()) for r in rows))
        if parts.core.policy_version % parts.config.save_steps == 0:
            await self._save()

    async def _log_step(self, batch: Batch, metrics: dict[str, float], *, train_s: float, num_tokens: int) -> None:
        parts, step = self._parts, self._parts.core.policy_version
        now = time.monotonic()
        elapsed_s, self._step_began_at = now - self._step_began_at, now
        arrived, self._arrived_tokens = self._arrived_tokens, 0
        self._trained_tokens += num_tokens
        depths = await patiently(lambda: self._queue_depths(), what="reading queue depths", timeout_s=60)
        head = {"step": float(step), "at_s": time.time()}
        pipeline = {
            "num_tokens": float(self._trained_tokens),
            "step_time": elapsed_s,
            "train_time": train_s,
            "throughput/generated_tokens_per_s": arrived / elapsed_s,
            "throughput/trained_tokens_per_s": num_tokens / train_s,
            "groups/admitted": float(parts.ledger.admitted),
            "groups/trained": float(parts.ledger.num_trained),
            "groups/dropped": float(parts.ledger.num_dropped),
            **{f"queue/{name}": float(depth) for name, depth in depths.items()},
            **parts.pushes.metrics(),
        }
        await parts.log.metrics(head | metrics | pipeline)
        if step % parts.config.log_rollouts_every_steps == 0:
            trained = Stamp("trained", time.time(), parts.replica_id)
            rows = rollout_rows(batch.groups, step=step, policy_version=step - 1, trained=trained)
            await parts.log.rollouts(step, rows)

    async def _queue_depths(self) -> dict[str, int]:
        keys, redis = self._parts.keys, self._parts.redis
        streams = {"prompts": keys.prompts, "completions": keys.completions, "scored": keys.scored}
        return {name: int(await redis.xlen(stream)) for name, stream in streams.items()}

    async def _save(self, *, always: bool = False) -> None:
        """Write a checkpoint with the ledger in it, then ack what it holds."""
        parts, step = self._parts, self._parts.core.policy_version
        if step == self._saved_step and not always:
            return
        await check_not_fenced(parts.redis, parts.keys, parts.epoch)
        extra = {"ledger": parts.ledger.to_json(), "trained_tokens": self._trained_tokens}
        await self._in_torch_thread(
            lambda: save_checkpoint(
                parts.files.checkpoints,
                parts.core,
                extra,
                step=step,
                keep=parts.config.save_total_limit,
                tokenizer=parts.tokenizer,
            )
        )
        self._saved_step = step
        await parts.log.settled(step, await parts.scored.ack(), by=parts.replica_id)

    async def _report_for_ever(self) -> None:
        while True:
            await self._write_progress()
            await asyncio.sleep(1.0)

    async def _write_progress(self) -> None:
        parts = self._parts
        progress = Progress(
            step=parts.core.policy_version,
            max_steps=parts.total_steps,
            policy_version=parts.core.policy_version,
            waiting_for=self._waiting_for,
            groups_admitted=parts.ledger.admitted,
            groups_trained=parts.ledger.num_trained,
            groups_dropped=parts.ledger.dropped_by_reason(),
            num_generators=parts.pushes.num_generators,
            pushes=parts.pushes.num_pushes,
            pushes_confirmed=parts.pushes.num_confirmed,
            updated_at_s=time.time(),
        )
        await parts.store.write_progress(parts.keys.run_id, progress)
        await parts.log.event("progress", {"step": progress.step, "waiting_for": progress.waiting_for})

    def _in_torch_thread(self, work: Callable[[], _ResultT]) -> Coroutine[Any, Any, _ResultT]:
        """Run ``work`` on the one thread that touches tensors, so that leases and progress go on meanwhile."""

        async def run() -> _ResultT:
            return await asyncio.get_running_loop().run_in_executor(self._torch, work)

        return run()
