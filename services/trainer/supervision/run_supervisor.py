"""Gives the generator fleet to one run at a time, and answers requests to stop, pause and resume runs.

    queued --oldest first--> running --rank_keeper.py, until it has ended--> the next run
      (not those asked to pause)

The state is in Redis: a run found ``running`` at start gets its rank again, which resumes from the checkpoint. When
this process is asked to stop, so is the rank, and its run stays ``running`` for the next start.
"""

import asyncio
import logging
from pathlib import Path
from typing import Literal

from services.trainer.beginning.held_files import remove_links, remove_links_unless_resumable, runs_with_links
from services.trainer.first_of import first_of
from services.trainer.settings import TrainerSettings
from services.trainer.supervision.rank_keeper import RankKeeper
from shared.errors import NoRoomError
from shared.redis.run_record import TERMINAL, RunRecord
from shared.redis.run_store import RunStore
from shared.service.logs import about

log = logging.getLogger(__name__)

_IDLE_S = 5.0
"""Time between searches for runs that this process was not notified about, in seconds."""


class RunSupervisor:
    """The loop that serves one run after the other.

    Args:
        store: Run records.
        settings: Rank command, grace periods, restarts.
        stopping: Set when this process is asked to end.
    """

    def __init__(self, store: RunStore, *, settings: TrainerSettings, stopping: asyncio.Event) -> None:
        self._store = store
        self._stopping = stopping
        self._news = asyncio.Event()
        self._changing = asyncio.Lock()
        self._runs_dir = settings.runs_dir
        self._has_tidied_up = False
        self.keeper = RankKeeper(store, settings=settings, stopping=stopping, pause=self._pause)

    def wake(self) -> None:
        """Have `supervise` look at the runs now, because a run was submitted or asked to stop."""
        self._news.set()

    async def stop_run(self, run_id: str) -> None:
        """Ask a run to stop. A queued run stops at once. Repeating it has no effect."""
        async with self._changing:
            record = await self._store.get(run_id)
            if record is None or record.status in TERMINAL:
                return
            await self._store.ask_to(run_id, "stop")
            self.keeper.forget_fence(run_id)
            if record.status == "queued":
                await self._stop_queued(record)
        self.wake()

    async def pause_run(self, run_id: str) -> bool:
        """Ask a run to pause; return False if it was asked to stop, because it is then not paused.

        A queued run lets others go first. Repeating it has no effect.
        """
        return await self._ask_unless_stopping(run_id, "pause")

    async def resume_run(self, run_id: str) -> bool:
        """Ask a run to continue, whatever paused it; return False if it was asked to stop.

        A run that is not paused does not change. A failed run is queued again and continues from its newest checkpoint;
        earlier requests are forgotten.
        """
        async with self._changing:
            record = await self._store.get(run_id)
            if record is not None and record.status == "failed":
                await self._store.ask_to(run_id, "run")
                await self._store.set_status(run_id, "queued", waits_for_room=False)
                self.keeper.forget_fence(run_id)
                self.wake()
                return True
        return await self._ask_unless_stopping(run_id, "run")

    async def _ask_unless_stopping(self, run_id: str, desired: Literal["run", "pause"]) -> bool:
        async with self._changing:
            record = await self._store.get(run_id)
            if record is not None and record.desired == "stop":
                return False
            if record is not None:
                await self._store.ask_to(run_id, desired)
                if desired == "run":
                    self.keeper.forget_fence(run_id)
        self.wake()
        return True

    async def supervise(self) -> None:
        """Serve one run after the other until asked to stop.

        Raises:
            UnavailableError: Redis stayed away too long. The rank is killed; its run keeps its status.
        """
        try:
            while not self._stopping.is_set():
                record = await self._next_run()
                if record is None:
                    await self._pause(_IDLE_S)
                else:
                    with about(run_id=record.run_id):
                        await self.keeper.serve(record)
                        await self._remove_unneeded_links(record.run_id)
        finally:
            self.keeper.kill()

    async def _next_run(self) -> RunRecord | None:
        """Give the fleet to a run and return it; return None if no run waits, or if Redis is full."""
        try:
            # Requests take this lock too, so it must not be held while Redis is full.
            async with self._changing:
                return await self._give_fleet_away()
        except NoRoomError as error:
            log.warning("no run is started now: %s", error)
            return None

    async def _give_fleet_away(self) -> RunRecord | None:
        if not self._has_tidied_up:
            await self._store.mend_lists()
            for run_id in await asyncio.to_thread(runs_with_links, self._runs_dir):
                await self._remove_unneeded_links(run_id)  # of a run whose end was cut short
            self._has_tidied_up = True
        served = await self._store.served()
        current = served[0] if served else await self._first_queued()
        if await self._store.current_run() != (current.run_id if current else None):
            await self._store.set_current_run(current.run_id if current else None)
        if current is not None and current.status == "queued":
            await self._store.set_status(current.run_id, "running", waits_for_room=False)
        return current

    async def _first_queued(self) -> RunRecord | None:
        """Return the oldest queued run that is asked to run. Stop those before it that are asked to stop."""
        for record in await self._store.queued():
            if record.desired == "stop":
                await self._stop_queued(record)
            elif record.desired == "run":
                return record
        return None

    async def _stop_queued(self, record: RunRecord) -> None:
        reason = f"stopped {'before it started' if record.started_at_s is None else 'while it waited for its turn'}"
        await self._store.set_status(record.run_id, "stopped", reason=reason, waits_for_room=False)
        await asyncio.to_thread(remove_links, Path(record.run_dir))  # a stopped run is never resumed

    async def _remove_unneeded_links(self, run_id: str) -> None:
        record = await self._store.get(run_id)
        if record is not None and record.status in TERMINAL:
            await asyncio.to_thread(remove_links_unless_resumable, Path(record.run_dir))

    async def _pause(self, timeout_s: float) -> None:
        """Wait until `wake` is called or this process is asked to end, but no longer than ``timeout_s`` seconds."""
        await first_of(self._news.wait(), self._stopping.wait(), timeout_s=timeout_s)
        self._news.clear()
