"""Saves the run while it goes on, and settles the groups of a checkpoint once it is on the disk.

    batch trained --> [copy weights, ledger] --> training goes on
                                |
                                +--> written, logs synced, still our run? --> renamed --> exactly its groups are acked

A disk without room is waited for. Training goes on at first, and stands still when the next batch is done: what it
made would be lost with this process, and its groups could not leave Redis.

The ledger and the entries to ack are those of the moment at which the weights were copied: a group that is trained
while the checkpoint is written is not in it, and keeps its entry until the next. One checkpoint is written at a time.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from services.trainer.checkpoints.checkpoint import CheckpointError, CheckpointWriter, PendingCheckpoint
from services.trainer.loop.reconcile import check_not_fenced
from services.trainer.loop.scored_groups import ScoredGroups
from services.trainer.policy.training_core import TrainingCore
from services.trainer.room import Room, is_disk_full
from services.trainer.telemetry.group_traces import GroupTraces
from services.trainer.telemetry.run_log import RunLog
from shared.errors import HeadraceError
from shared.keys import RunKeys
from shared.redis_connection import Redis
from shared.streams import Delivery

log = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")

_WHAT = "a checkpoint"


class CheckpointSaver:
    """Writes one run's checkpoints in the background.

    Args:
        writer: Of the run's directory.
        redis: Client of redis_connection.py.
        keys: Keys of the run.
        epoch: This trainer's incarnation; a newer one's checkpoints are not interfered with.
        core: What is saved.
        tokenizer: Saved with it.
        scored: Holds the entries that wait for a checkpoint.
        run_log: Told which groups are settled.
        replica_id: Of this trainer, for the log.
        room: Waited for where the disk is full.
        traces: Told which groups are settled, too.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        *,
        redis: Redis,
        keys: RunKeys,
        epoch: int,
        core: TrainingCore,
        tokenizer: Any,
        scored: ScoredGroups,
        run_log: RunLog,
        replica_id: str,
        room: Room | None = None,
        traces: GroupTraces | None = None,
    ) -> None:
        self._room = room or Room()
        self._traces = traces or GroupTraces()
        self._writer = writer
        self._redis = redis
        self._keys = keys
        self._epoch = epoch
        self._core = core
        self._tokenizer = tokenizer
        self._scored = scored
        self._log = run_log
        self._replica_id = replica_id
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        self._pending: asyncio.Task[bool] | None = None
        """Returns whether there was room for it."""
        self._start: Callable[[], Awaitable[None]] | None = None
        self._saved_step = core.policy_version
        self._metrics: dict[str, float] = {}

    @property
    def saved_step(self) -> int:
        """The step of the checkpoint begun last, or resumed from."""
        return self._saved_step

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is on its way to the disk, or its groups are not acked yet."""
        return self._pending is not None and not self._pending.done()

    async def begin(
        self, tasks: asyncio.TaskGroup, torch_thread: ThreadPoolExecutor, extra: Callable[[], dict[str, Any]]
    ) -> None:
        """Copy weights and ledger for a checkpoint, which a task goes on to write.

        Waits for the checkpoint before this one. Nothing may be trained or dropped meanwhile.

        Args:
            tasks: Where the writing goes on; a failure ends it.
            torch_thread: The one that touches tensors.
            extra: Returns what the loop wants to keep, the ledger among it; called when its turn has come.

        Raises:
            CheckpointError: It cannot be written.
            FencedError: A newer incarnation owns the run.
        """
        had_room = await self._is_written()
        self._start = functools.partial(self._begin, tasks, torch_thread, extra)
        await self._start()
        if not had_room:
            await self.finish()

    async def finish(self) -> None:
        """Wait until the checkpoint begun last, if there is one, is on the disk and its groups are acked.

        If there was no room for it, one of what is trained by now is written as soon as there is.

        Raises:
            CheckpointError: It cannot be written.
            UnavailableError: This process was asked to end, and there was still no room.
        """
        backoff_s = 0.5
        while not await self._is_written():
            backoff_s = await self._room.wait(what=_WHAT, where=self._writer.root, backoff_s=backoff_s)
            assert self._start is not None
            await self._start()

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
        self._pending = tasks.create_task(
            self._complete(pending, settled, saved_before=before), name=f"checkpoint of step {step}"
        )

    async def _is_written(self) -> bool:
        """Wait for the checkpoint begun last, if there is one; return False if there was no room for it."""
        if self._pending is None:
            return True
        had_room = await asyncio.shield(self._pending)
        self._pending = None
        return had_room

    def metrics(self) -> dict[str, float]:
        """Return the seconds that the newest checkpoint took; nothing before the first."""
        return dict(self._metrics)

    async def _complete(self, pending: PendingCheckpoint, settled: list[Delivery], *, saved_before: int) -> bool:
        try:
            await self._in_thread(lambda: self._writer.wait(pending))
            await self._log.sync()
            # The run may have been taken over during the minutes that a large checkpoint takes.
            await self._check_not_fenced()
            path = await self._in_thread(lambda: self._writer.publish(pending))
        except CheckpointError as error:
            # A newer trainer clears away what an older one was writing. That one must not start again for it.
            await self._check_not_fenced()
            if not is_disk_full(error):
                raise
            self._saved_step = saved_before
            await self._room.note(what=_WHAT, where=self._writer.root)
            return False
        except HeadraceError:
            await self._in_thread(lambda: self._writer.discard(pending))
            raise
        self._room.found(_WHAT)
        took_s = time.monotonic() - pending.began_at
        self._metrics = {"checkpoint/standstill_s": pending.standstill_s, "checkpoint/total_s": took_s}
        log.info("wrote %s in %.1f s; training stood still for %.2f s", path, took_s, pending.standstill_s)
        acked = await self._scored.ack(settled)
        await self._log.settled(pending.step, acked, by=self._replica_id)
        await self._in_thread(lambda: self._traces.settled(acked))
        return True

    async def _check_not_fenced(self) -> None:
        await check_not_fenced(self._redis, self._keys, self._epoch)

    async def _in_thread(self, work: Callable[[], _ResultT]) -> _ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def _no_room() -> bool:
    return False
