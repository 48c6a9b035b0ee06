"""Starts the training rank of the current run, watches it, and restarts it when it crashes.

    start --rank exits 0 after it wrote how the run ended--> done
     ^  |
     |  |  crash, or no start: again, after 0.5 s .. 10 s
     +--+
        |  too many crashes without a new step: failed, with the rank's last line
        |  exit 2 (the user can fix it): failed, with the reason the rank wrote
        |  exit 3 (fenced): not touched, a newer trainer has it

run_supervisor.py decides which run is served.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from services.trainer.disk_room import is_disk_full, room_for
from services.trainer.first_of import first_of
from services.trainer.ranks.exit_status import ENDED, FENCED, REFUSED
from services.trainer.settings import TrainerSettings
from services.trainer.supervision.rank_command import rank_command
from services.trainer.supervision.rank_process import RankProcess, last_line
from services.trainer.supervision.restarts import Restarts
from shared.errors import UserError
from shared.redis.run_record import TERMINAL, RunRecord
from shared.redis.run_store import RunStore
from shared.run_options.run_config import parse_run_config
from shared.service.stopped_processes import Stops

log = logging.getLogger(__name__)


class RankKeeper:
    """Starts, watches and restarts training ranks, one at a time.

    Args:
        store: Run records.
        settings: Rank command, grace periods, restarts.
        stopping: Set when this process is asked to end.
        pause: Waits that many seconds, or less if there is news of a run or this process is asked to end.

    Attributes:
        num_restarts: Number of restarts so far.
        rank: The rank that runs now, if one does.
    """

    def __init__(
        self,
        store: RunStore,
        *,
        settings: TrainerSettings,
        stopping: asyncio.Event,
        pause: Callable[[float], Awaitable[None]],
    ) -> None:
        self._store = store
        self._settings = settings
        self._stopping = stopping
        self._pause = pause
        self._notes: dict[str, str] = {}
        self._fenced: set[str] = set()
        self.num_restarts = 0
        self.rank: RankProcess | None = None

    def note(self, run_id: str) -> str:
        """Return the reason why a run's rank is not training, such as a full disk or a crash; empty without one."""
        return self._notes.get(run_id, "")

    def forget_fence(self, run_id: str) -> None:
        """Serve a run again although a newer trainer took it over, because it was resumed or stopped here."""
        self._fenced.discard(run_id)

    def kill(self) -> None:
        """Kill the rank, if one runs."""
        if self.rank is not None:
            self.rank.kill()

    async def serve(self, record: RunRecord) -> None:
        """Keep the rank of one run alive until the run ends or vanishes, or this process is asked to stop."""
        run_id = record.run_id
        if run_id in self._fenced:
            await self._pause(self._settings.supervise_every_s)
            return
        settings = self._settings
        restarts = Restarts(
            max_without_progress=settings.max_restarts_without_progress,
            first_backoff_s=settings.first_backoff_s,
            last_backoff_s=settings.last_backoff_s,
            best_step=record.progress.step,
        )
        try:
            while not self._stopping.is_set():
                status = await self._run_rank_once_there_is_room(record)
                if status is None:
                    return
                if self._stopping.is_set() or not await self._start_again(record, status, restarts):
                    return
        except UserError as error:
            await self._end(run_id, "failed", str(error))
        finally:
            self._notes.pop(run_id, None)

    async def _run_rank_once_there_is_room(self, record: RunRecord) -> int | OSError | None:
        """Run the rank once its log can be written; return its exit status, or why it did not start.

        Returns None if the run was asked to stop while the disk was full.
        """
        while True:
            try:
                rank = await self._start_rank(record)
            except OSError as error:
                if not is_disk_full(error) or self._stopping.is_set():
                    return error
                where = Path(record.run_dir)
                self._notes[record.run_id] = says = room_for("the log of its training rank", where)
                log.warning("run %s waits for %s", record.run_id, says)
                if await self._pause_unless_asked_to_stop(record.run_id, self._settings.last_backoff_s):
                    await self._end(record.run_id, "stopped", f"stopped while the disk of {where} was full")
                    return None
                continue
            self.rank = rank
            try:
                return await self._watch(record.run_id, rank)
            finally:
                rank.kill()
                self.rank = None

    async def _start_rank(self, record: RunRecord) -> RankProcess:
        """Start the run's training rank, with its output in ``rank.log``.

        Raises:
            UserError: The command cannot be run, or a run that has made steps would begin anew: its directory is gone.
            OSError: The log cannot be written.
        """
        _require_directory(await self._store.get(record.run_id) or record)
        rank = await RankProcess.start(
            rank_command(record.run_id, parse_run_config(record.config), self._settings),
            log=rank_log(record),
            environment=self._settings.rank_environment(),
            cpus=self._settings.rank_cpus,
        )
        log.info("run %s: training rank started, pid %d, log %s", record.run_id, rank.pid, rank_log(record))
        return rank

    async def _watch(self, run_id: str, rank: RankProcess) -> int:
        """Wait for a rank to exit, and return its exit status. End it if this process is asked to end.

        It is also ended if it outlives its run for long, and killed if a signal has stopped it for a minute.
        """
        started_at_s, overdue_s = time.time(), 0.0
        stops = Stops(every_s=self._settings.supervise_every_s)
        while not self._stopping.is_set():
            status = await self._exit_or_stopping(rank)
            if status is not None:
                return status
            record = await self._store.get(run_id)
            if record is not None and record.progress.updated_at_s > started_at_s and not record.progress.starting:
                self._notes.pop(run_id, None)  # the rank trains again
            if stops.look([rank.pid]):
                log.error("run %s: its training rank %d was stopped for a minute: killed", run_id, rank.pid)
                rank.kill()
                return await rank.wait()
            overdue_s += self._settings.supervise_every_s if record is None or _is_over(record) else 0.0
            if overdue_s > self._settings.rank_exit_grace_s:
                log.error("run %s has ended, but its training rank %d does not exit: killed", run_id, rank.pid)
                break
        return await rank.stop(grace_s=self._settings.rank_stop_grace_s)

    async def _exit_or_stopping(self, rank: RankProcess) -> int | None:
        await first_of(rank.wait(), self._stopping.wait(), timeout_s=self._settings.supervise_every_s)
        return await rank.wait() if rank.has_ended else None

    async def _start_again(self, record: RunRecord, status: int | OSError, restarts: Restarts) -> bool:
        """Handle the end of a rank, or a start that failed; wait if needed, and return whether to start it again."""
        run_id = record.run_id
        now = await self._store.get(run_id)
        if now is None:
            log.error("run %s is no longer in Redis; only its directory %s is left", run_id, record.run_dir)
            return False
        if _is_over(now):
            log.info("run %s %s %s", run_id, now.status, now.reason)
            # The rank may have been killed before it did this, or may have done it after the run was queued again.
            await self._store.lists.enter(run_id, now.status, waits_for_room=True)
            await self._store.lists.leave_others(run_id, "queued", waits_for_room=True)
            return False
        if status == FENCED:
            log.warning(
                "run %s: a newer trainer has taken it over; its rank is not restarted here, unless the run is resumed "
                "or stopped here",
                run_id,
            )
            self._fenced.add(run_id)
            return False
        if now.desired == "stop":
            await self._end(run_id, "stopped", _stopped_without_rank(record, status))
            return False
        said = last_line(rank_log(record))
        if status == REFUSED:
            await self._end(run_id, "failed", said or f"its training rank gave no reason; see {rank_log(record)}")
            return False
        backoff_s = restarts.next_backoff_s(now.progress.step, is_paused=now.status == "paused")
        if backoff_s is None:
            reason = (
                f"the training rank {_how(status)} {restarts.without_progress} times without completing a step. "
                f"It last said: {said or 'nothing'}. Its log is {rank_log(record)}"
            )
            await self._end(run_id, "failed", reason)
            return False
        self.num_restarts += 1
        log.warning("run %s: training rank %s, restarting it in %.1f s", run_id, _how(status), backoff_s)
        self._notes[run_id] = (
            f"its training rank, which {_how(status)} and is being restarted; it last said: {said or 'nothing'}"
        )
        if await self._pause_unless_asked_to_stop(run_id, backoff_s):
            await self._end(run_id, "stopped", _stopped_without_rank(record, status))
            return False
        return True

    async def _pause_unless_asked_to_stop(self, run_id: str, pause_s: float) -> bool:
        """Wait for ``pause_s`` seconds or for the end of this process; return True at once if asked to stop the run."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + pause_s
        while (left_s := deadline - loop.time()) > 0 and not self._stopping.is_set():
            await self._pause(left_s)
            record = await self._store.get(run_id)
            if record is not None and record.desired == "stop":
                return True
        return False

    async def _end(self, run_id: str, status: Literal["stopped", "failed"], reason: str) -> None:
        log.info("run %s %s: %s", run_id, status, reason)
        await self._store.set_status(run_id, status, reason=reason)


def rank_log(record: RunRecord) -> Path:
    """Return the path of the file with the output of a run's training ranks: ``rank.log`` in the run's directory."""
    return Path(record.run_dir) / "rank.log"


def _require_directory(record: RunRecord) -> None:
    """Raise UserError if the directory of a run that has made steps was moved or deleted."""
    if record.progress.step > 0 and not Path(record.run_dir).is_dir():
        raise UserError(f"its directory {record.run_dir} is not there any more: move it back, and resume the run")


def _is_over(record: RunRecord) -> bool:
    """Return whether a run that had a rank has ended. A run that failed and was resumed is queued, and counts too."""
    return record.status in TERMINAL or record.status == "queued"


def _how(status: int | OSError) -> str:
    """Return how the rank ended. It follows the words 'the training rank'."""
    if isinstance(status, OSError):
        return f"could not be started ({status})"
    if status < 0:
        return f"was killed by signal {-status}"
    if status == ENDED:
        return "exited without finishing the run"
    return f"crashed with exit status {status}"


def _stopped_without_rank(record: RunRecord, status: int | OSError) -> str:
    return f"stopped while its training rank was down (it {_how(status)}); its checkpoints are in {record.run_dir}"
