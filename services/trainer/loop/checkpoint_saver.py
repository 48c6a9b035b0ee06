"""Saves checkpoints while training continues, and acks the groups of a checkpoint once it is on disk.

    batch trained --> [copy weights, ledger] --> training continues
                                |
                                +--> written, logs synced, still our run? --> renamed --> its groups only are acked

If the disk is full, the checkpoint is retried. Training continues with the next batch, and then waits: more work would
be lost if this process ended, and its groups could not leave Redis.

The ledger and the entries to ack date from the moment at which the weights were copied. A group trained while the
checkpoint is being written is not in it, and keeps its entry until the next checkpoint. One is written at a time.
"""

import asyncio
import functools
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from services.trainer.checkpoints.checkpoint_writer import CheckpointError, CheckpointWriter, PendingCheckpoint
from services.trainer.checkpoints.saving_group import RankGoneError
from services.trainer.disk_room import Room, is_disk_full
from services.trainer.fence import check_not_fenced
from services.trainer.intake.scored_groups import ScoredGroups
from services.trainer.policy.ranks import RankLostError
from services.trainer.policy.training_core import TrainingCore
from services.trainer.telemetry.group_traces import GroupTraces
from services.trainer.telemetry.run_log import RunLog
from shared.errors import HeadraceError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.streams import Delivery

log = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")

_WHAT = "a checkpoint"


class CheckpointSaver:
    """Writes one run's checkpoints in the background.

    Args:
        writer: Writes to the run's directory.
        redis: Client of the Redis server that has the run's streams.
        keys: Keys of the run.
        incarnation: This trainer's incarnation. Checkpoints of newer incarnations are not touched.
        core: The policy and optimizer to save.
        tokenizer: Saved with the model.
        scored: Holds the entries that wait for a checkpoint.
        run_log: Records which groups are settled.
        replica_id: This trainer's id, for the run log.
        room: Waits while the disk is full.
        traces: Also record which groups are settled.
        superseded: A directory that the run no longer needs once it has a checkpoint. It need not exist.
        resumed_step: Step of the checkpoint that was resumed from; None without one.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        *,
        redis: Redis,
        keys: RunKeys,
        incarnation: int,
        core: TrainingCore,
        tokenizer: Any,
        scored: ScoredGroups,
        run_log: RunLog,
        replica_id: str,
        room: Room | None = None,
        traces: GroupTraces | None = None,
        superseded: Path | None = None,
        resumed_step: int | None = None,
    ) -> None:
        self._superseded = superseded
        self._room = room or Room()
        self._traces = traces or GroupTraces()
        self._writer = writer
        self._redis = redis
        self._keys = keys
        self._incarnation = incarnation
        self._core = core
        self._tokenizer = tokenizer
        self._scored = scored
        self._log = run_log
        self._replica_id = replica_id
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        self._pending: asyncio.Task[bool] | None = None
        """Returns False if the disk was full."""
        self._start: Callable[[], Awaitable[None]] | None = None
        self._saved_step = core.policy_version
        self._sound_step = resumed_step
        self._metrics: dict[str, float] = {}

    @property
    def saved_step(self) -> int:
        """The step of the checkpoint that was begun last, or that the run resumed from."""
        return self._saved_step

    def has_checkpoint_of(self, step: int) -> bool:
        """Whether the newest checkpoint is of ``step``: on disk, or being written."""
        return self._sound_step == step

    def keep_best(self, step: int | None) -> None:
        """Never delete the checkpoint of ``step``, the best one so far. None protects no checkpoint."""
        self._writer.best_step = step

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written, or its groups are not acked yet."""
        return self._pending is not None and not self._pending.done()

    async def begin(
        self, tasks: asyncio.TaskGroup, torch_thread: ThreadPoolExecutor, extra: Callable[[], dict[str, Any]]
    ) -> None:
        """Copy weights and ledger for a checkpoint, and start the task that writes it.

        Waits for the previous checkpoint. Nothing may be trained or dropped meanwhile.

        Args:
            tasks: Runs the writing task. A failure of the task ends the group.
            torch_thread: The thread that touches tensors.
            extra: Returns the training loop's state, including the ledger; called when the copy is made.

        Raises:
            CheckpointError: The checkpoint cannot be written.
            FencedError: A newer incarnation owns the run.
        """
        had_room = await self._is_written()
        self._start = functools.partial(self._begin, tasks, torch_thread, extra)
        await self._start()
        if not had_room:
            await self.finish()

    async def finish(self) -> None:
        """Wait until the checkpoint that was begun last is on disk and its groups are acked.

        If the disk was full, a checkpoint of the present state is written as soon as there is space.

        Raises:
            CheckpointError: The checkpoint cannot be written.
            UnavailableError: This process was asked to end while the disk was full.
        """
        backoff_s = 0.5
        while not await self._is_written():
            backoff_s = await self._room.wait(what=_WHAT, where=self._writer.root, backoff_s=backoff_s)
            assert self._start is not None
            await self._start()

    async def finish_begun(self) -> None:
        """Wait for the checkpoint that is being written, if any. Unlike `finish`, never write another one.

        Raises:
            CheckpointError: The checkpoint cannot be written.
        """
        await self._is_written()

    async def _begin(
        self, tasks: asyncio.TaskGroup, torch_thread: ThreadPoolExecutor, extra: Callable[[], dict[str, Any]]
    ) -> None:
        await self._check_not_fenced()
        step, settled, kept = self._core.policy_version, self._scored.settled(), extra()
        try:
            pending = await asyncio.get_running_loop().run_in_executor(
                torch_thread, lambda: self._writer.begin(self._core, kept, step=step, tokenizer=self._tokenizer)
            )
        except CheckpointError as error:
            await self._check_not_fenced()
            if not is_disk_full(error):
                raise
            await self._room.note(what=_WHAT, where=self._writer.root)
            self._pending = tasks.create_task(_no_room(), name=f"no checkpoint of step {step}")
            return
        before, self._saved_step = self._saved_step, step
        self._sound_step = step
        self._pending = tasks.create_task(
            self._complete(pending, settled, saved_before=before), name=f"checkpoint of step {step}"
        )

    async def _is_written(self) -> bool:
        """Wait for the checkpoint that was begun last, if any; return False if the disk was full."""
        if self._pending is None:
            return True
        had_room = await asyncio.shield(self._pending)
        self._pending = None
        return had_room

    def metrics(self) -> dict[str, float]:
        """Return the durations of the newest checkpoint in seconds; empty before the first."""
        return dict(self._metrics)

    async def _complete(self, pending: PendingCheckpoint, settled: list[Delivery], *, saved_before: int) -> bool:
        try:
            await self._in_thread(lambda: self._writer.wait(pending))
            await self._log.sync()
            # Writing a large checkpoint takes minutes, in which another trainer may have taken over the run.
            await self._check_not_fenced()
            path = await self._in_thread(lambda: self._writer.publish(pending))
        except CheckpointError as error:
            # A newer trainer deletes the files of an older one, which must then end as fenced and not be restarted.
            await self._check_not_fenced()
            if isinstance(error.__cause__, RankGoneError):
                raise RankLostError(str(error.__cause__)) from error  # its launcher knows why it is gone
            if not is_disk_full(error):
                raise
            self._saved_step, self._sound_step = saved_before, None
            await self._room.note(what=_WHAT, where=self._writer.root)
            return False
        except HeadraceError:
            await self._in_thread(lambda: self._writer.discard(pending))
            raise
        self._room.found(_WHAT)
        if self._superseded is not None:
            await self._in_thread(functools.partial(shutil.rmtree, self._superseded, ignore_errors=True))
            self._superseded = None
        took_s = time.monotonic() - pending.began_at
        self._metrics = {"checkpoint/standstill_s": pending.standstill_s, "checkpoint/total_s": took_s}
        log.info("wrote %s in %.1f s; training stood still for %.2f s", path, took_s, pending.standstill_s)
        acked = await self._scored.ack(settled)
        await self._log.settled(pending.step, acked, by=self._replica_id)
        await self._in_thread(lambda: self._traces.settled(acked))
        return True

    async def _check_not_fenced(self) -> None:
        await check_not_fenced(self._redis, self._keys, self._incarnation)

    async def _in_thread(self, work: Callable[[], _ResultT]) -> _ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def _no_room() -> bool:
    return False
