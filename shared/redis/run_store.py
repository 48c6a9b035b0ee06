"""Reads and writes the record of each run in Redis (run_record.py).

Only the trainer service writes ``status``; generators and rewarders read it. The run's directory outlives this record:
the checkpoint is the authority on what was trained.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from redis.exceptions import ResponseError

from shared.beginning import Beginning
from shared.errors import NoRoomError, StateLostError, UnavailableError
from shared.lineage import NO_WEIGHTS, LineageVersion
from shared.pause import Desired, Pause, Wishes
from shared.redis.keys import CURRENT_RUN, RUNS, RunKeys
from shared.redis.redis_connection import Redis, call, patiently
from shared.redis.run_index import RunIndex
from shared.redis.run_lists import RunLists
from shared.redis.run_record import TERMINAL, Progress, RunRecord, Status, decode_record
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)

_PATIENCE_S, _CLEAN_S = 60.0, 5.0
_KEPT_EVENTS = 1000
"""Events of a run that has ended, for watchers. Its directory has all metrics and evaluations."""
_MAX_READ = 100
"""Records read in one round trip."""


class RunStore:
    """Reads and writes the Redis records of all runs, and keeps the lists and the index of runs up to date."""

    def __init__(self, redis: Redis) -> None:
        self.lists = RunLists(redis)
        self.index = RunIndex(redis)
        self._redis = redis
        self._incarnation: int | None = None

    def write_as(self, incarnation: int) -> None:
        """Write status and progress as this incarnation of a run's trainer from now on.

        Such a write raises FencedError once a newer incarnation has taken over the run.
        """
        self._incarnation = incarnation

    async def create(
        self, run_id: str, config: RunConfig, *, run_dir: str, beginning: Beginning | None = None
    ) -> RunRecord:
        """Make the run's streams and consumer groups, then its record. No other function makes them.

        Raises:
            NoRoomError: Redis has no room for the run, and nothing of the run is left there.
            UnavailableError: The run could not be made, and its parts could not be removed. Create it again.
        """
        try:
            await self._write_new(run_id, config, run_dir=run_dir, beginning=beginning)
        except NoRoomError as error:
            # A first try, whose answer was lost, may have written the record all the same.
            if await self.get(run_id) is None:
                await self._remove_half(run_id, config.name, error)
                raise
        record = await self.get(run_id)
        if record is None:
            raise StateLostError(f"run {run_id} vanished while it was created")
        return record

    async def _write_new(self, run_id: str, config: RunConfig, *, run_dir: str, beginning: Beginning | None) -> None:
        keys = RunKeys(run_id)
        for stream, consumer_group in keys.consumer_groups():
            await self._make_consumer_group(stream, consumer_group)
        created_at_s = time.time()
        fields: dict[Any, Any] = {
            "config": msgspec.json.encode(config.model_dump(mode="json")),
            "status": "queued",
            "desired": "run",
            "reason": "",
            "created_at_s": repr(created_at_s),
            "run_dir": run_dir,
            "progress": msgspec.json.encode(Progress()),
        }
        if beginning is not None:
            fields["beginning"] = msgspec.json.encode(beginning)
        # Listed first: readers skip a run whose creation stopped here, and creating it again completes it.
        await self._asked(lambda: self._redis.zadd(RUNS, {run_id: created_at_s}), "listing the run")
        await self.lists.enter(run_id, "queued", waits_for_room=False)
        await self.index.enter({run_id: config.name})

        async def write() -> None:
            # A first try, whose answer was lost, may have written the record, and the run may have begun since.
            if not await self._redis.exists(keys.run):
                await self._redis.hset(keys.run, mapping=fields)

        await self._asked(write, "writing the run")

    async def _remove_half(self, run_id: str, name: str | None, cause: NoRoomError) -> None:
        try:
            await self.index.leave(run_id, name)
            await self.delete(run_id)
        except NoRoomError:  # on a full disk, nothing can be deleted either
            raise UnavailableError(str(cause)) from cause

    async def get(self, run_id: str) -> RunRecord | None:
        """Return the record of a run, or None if the run does not exist."""
        fields = await self._patiently(lambda: self._redis.hgetall(RunKeys(run_id).run), "reading the run record")
        return decode_record(run_id, fields)

    async def get_all(self, run_ids: Sequence[str]) -> list[RunRecord]:
        """Return the records of the runs that exist, in the same order."""
        found: list[RunRecord | None] = []
        for start in range(0, len(run_ids), _MAX_READ):
            some = run_ids[start : start + _MAX_READ]
            read = [("HGETALL", RunKeys(run_id).run) for run_id in some]
            found += map(decode_record, some, await self._read_each(read))
        return [record for record in found if record is not None]

    async def list_ids(self) -> list[str]:
        """Return all run ids, oldest first."""
        names = await self._patiently(lambda: self._redis.zrange(RUNS, 0, -1), "listing runs")
        return [name.decode() for name in names]

    async def statuses(self, run_ids: Sequence[str]) -> dict[str, Status]:
        """Return the statuses of the runs that exist. This reads less than their records."""
        found: dict[str, Status] = {}
        for start in range(0, len(run_ids), _MAX_READ):
            some = run_ids[start : start + _MAX_READ]
            read = [("HGET", RunKeys(run_id).run, "status") for run_id in some]
            answers = zip(some, await self._read_each(read), strict=True)
            found |= {run_id: status.decode() for run_id, status in answers if status is not None}
        return found

    async def ending(self, run_id: str) -> tuple[str, str] | None:
        """Return the run's last status (``deleted`` without a record) and the reason; None if it has not ended."""
        status, reason = await self._patiently(
            lambda: self._redis.hmget(RunKeys(run_id).run, ["status", "reason"]), "reading the status"
        )
        if status is None:
            return "deleted", ""
        return (status.decode(), reason.decode()) if status.decode() in TERMINAL else None

    async def page(
        self, *, limit: int, before: tuple[float, str] | None = None, key: str = RUNS
    ) -> list[tuple[float, str]]:
        """Return creation times and ids of the runs on a list that were created before ``before``, newest first."""
        start, found = 0, list[tuple[float, str]]()
        newest = "+inf" if before is None else repr(before[0])
        while len(found) < limit:
            some = await self._patiently(
                lambda first=start: self._redis.zrange(
                    key, newest, "-inf", desc=True, byscore=True, offset=first, num=limit, withscores=True
                ),
                "listing runs",
            )
            pairs = [(float(created_at_s), name.decode()) for name, created_at_s in some]
            found += [pair for pair in pairs if before is None or pair < before]
            if len(pairs) < limit:
                break
            start += limit
        return found[:limit]

    async def served(self) -> list[RunRecord]:
        """Return the runs that are running or paused, oldest first."""
        records = await self.get_all(await self.lists.served())
        return [record for record in records if record.status in ("running", "paused")]

    async def queued(self) -> list[RunRecord]:
        """Return the runs that wait for their turn, oldest first."""
        records = await self.get_all(await self.lists.queued())
        return [record for record in records if record.status == "queued"]

    async def num_queued(self) -> int:
        """Return how many runs wait for their turn, without those whose creation stopped half-way."""
        statuses = await self.statuses(await self.lists.queued())
        return sum(status == "queued" for status in statuses.values())

    async def mend_lists(self) -> None:
        """Make lists and index agree with the records again, after a crash or an older release. Raises NoRoomError."""
        statuses = await self.statuses(await self.list_ids())
        await self.lists.mend(statuses)
        missing = statuses.keys() - await self.index.ids()
        await self.index.enter({record.run_id: record.name for record in await self.get_all([*missing])})

    async def set_status(self, run_id: str, status: Status, *, reason: str = "", waits_for_room: bool = True) -> None:
        """Write the status of a run, with its reason and the time at which it was reached.

        If the run can never go on, its groups are deleted. Groups of a failed run stay, because a user may resume it.

        Raises:
            NoRoomError: Redis has no room, and ``waits_for_room`` is False.
        """
        fields: dict[Any, Any] = {"status": status, "reason": reason}
        if status == "running":
            fields["started_at_s"] = repr(time.time())
        fields["ended_at_s"] = repr(time.time()) if status in TERMINAL else ""
        await self.lists.enter(run_id, status, waits_for_room=waits_for_room)
        await self._write(run_id, fields, waits_for_room=waits_for_room)
        await self.lists.leave_others(run_id, status, waits_for_room=waits_for_room)
        if status in ("finished", "stopped"):
            try:
                await self._delete_groups(RunKeys(run_id))
            except (UnavailableError, ResponseError) as error:  # they cost only memory, until the run is deleted
                log.warning(
                    "the groups of run %s, which has ended, stay in Redis until it is deleted: %s", run_id, error
                )

    async def _delete_groups(self, keys: RunKeys) -> None:
        """Delete a run's groups in all streams, the recordings of their sessions and old events, but no dead letters.

        The streams stay, as do their pending lists: services that have not noticed the end of the run may finish or
        give back what they read. They may record more, so `delete` still has to know which groups were begun.
        """
        what = "deleting the groups of a run that has ended"
        started = await patiently(  # HGETALL, because the trainer's Redis user may not call HKEYS
            lambda: self._redis.hgetall(keys.started), what=what, timeout_s=_CLEAN_S, waits_for_room=False
        )

        async def delete() -> None:
            async with self._redis.pipeline(transaction=False) as pipe:
                for stream, _ in keys.consumer_groups():
                    pipe.xtrim(stream, maxlen=0, approximate=False)
                    pipe.delete(keys.seen(stream))
                pipe.xtrim(keys.events, maxlen=_KEPT_EVENTS, approximate=False)
                for group_id in started:
                    pipe.delete(keys.sessions(group_id.decode(errors="replace")))
                await pipe.execute()

        await patiently(delete, what=what, timeout_s=_CLEAN_S, waits_for_room=False)

    async def change_config(self, record: RunRecord, config: RunConfig) -> None:
        """Replace the settings of a run.

        Args:
            record: The run's current record.
            config: All of its settings after the change.

        Raises:
            NoRoomError: Redis has no room.
        """
        await self.index.enter({record.run_id: config.name})
        fields: dict[Any, Any] = {"config": msgspec.json.encode(config.model_dump(mode="json"))}
        if config.max_steps != record.config["max_steps"]:
            fields["max_steps"] = config.max_steps
        await self._write(record.run_id, fields, waits_for_room=False)
        if config.name != record.name:
            await self.index.leave_name(record.run_id, record.name)

    async def write_pause(self, run_id: str, pause: Pause | None) -> None:
        """Set the run's status to paused, with the reason; or to running, if ``pause`` is None."""
        fields: dict[Any, Any] = {"status": "running", "reason": ""}
        if pause is not None:
            fields = {"status": "paused", "reason": pause.reason, "pause": msgspec.json.encode(pause)}
        await self._write(run_id, fields)

    async def ask_to(self, run_id: str, desired: Desired) -> None:
        """Request that the run goes on, pauses or stops. Its training rank reads the request between two batches."""
        await call(
            self._redis,
            "headrace_ask",
            keys=(RunKeys(run_id).run,),
            args=(desired,),
            timeout_s=_PATIENCE_S,
            waits_for_room=False,
        )

    async def wishes(self, run_id: str) -> Wishes:
        """Return the requested state of the run. Raises StateLostError if its record is gone."""
        names = ["desired", "num_resumes", "max_steps"]
        desired, num_resumes, max_steps = await self._patiently(
            lambda: self._redis.hmget(RunKeys(run_id).run, names), "reading the run"
        )
        if desired is None:
            raise StateLostError(f"run {run_id} is no longer in Redis")
        return Wishes(
            desired=desired.decode(),
            num_resumes=int(num_resumes or 0),
            max_steps=None if max_steps is None else int(max_steps),
        )

    async def write_progress(self, run_id: str, progress: Progress) -> None:
        """Overwrite the progress of the run."""
        await self._write(run_id, {"progress": msgspec.json.encode(progress)})

    async def write_starting(self, record: RunRecord, doing: str) -> None:
        """Write the current work of a training rank that does not train yet.

        The counts of the rank before it stay, but not its evaluation, its end, its full disk and the replicas left out.
        """
        progress = msgspec.structs.replace(
            record.progress,
            starting=doing,
            is_evaluating=False,
            is_ending=False,
            disk_full="",
            num_left_out=0,
            left_out={},
            updated_at_s=time.time(),
        )
        await self.write_progress(record.run_id, progress)

    async def current_run(self) -> str | None:
        """Return the id of the run that the generator fleet serves now; None without one."""
        run_id = await self._patiently(lambda: self._redis.get(CURRENT_RUN), "reading the current run")
        return None if run_id is None else str(run_id.decode())

    async def set_current_run(self, run_id: str | None) -> None:
        """Point the generator fleet at a run, or at none.

        Raises:
            NoRoomError: The disk of Redis is full.
        """
        if run_id is None:
            await self._asked(lambda: self._redis.delete(CURRENT_RUN), "clearing the current run")
        else:
            await call(
                self._redis,
                "headrace_point",
                keys=(CURRENT_RUN,),
                args=(run_id,),
                timeout_s=_PATIENCE_S,
                waits_for_room=False,
            )

    async def required_version(self, run_id: str) -> LineageVersion:
        """Return the oldest version with which a generator may take prompts; NO_WEIGHTS before the first push."""
        raw = await self._patiently(
            lambda: self._redis.get(RunKeys(run_id).required_version), "reading the required policy version"
        )
        return NO_WEIGHTS if raw is None else LineageVersion.parse(raw.decode())

    async def delete(self, run_id: str) -> None:
        """Delete all Redis keys of the run, not its directory. Raises NoRoomError if the disk of Redis is full."""
        record = await self.get(run_id)
        await self._asked(lambda: self._redis.zrem(RUNS, run_id), "unlisting the run")
        await self.lists.leave_others(run_id, "deleted", waits_for_room=False)
        await self.index.leave(run_id, None if record is None else record.name)
        keys = RunKeys(run_id)
        started = await self._patiently(lambda: self._redis.hgetall(keys.started), "reading which groups were begun")
        sessions = [keys.sessions(group_id.decode(errors="replace")) for group_id in started]
        await self._asked(lambda: self._redis.delete(*keys.everything(), *sessions), "deleting the run's keys")

    async def _write(self, run_id: str, fields: dict[Any, Any], *, waits_for_room: bool = True) -> None:
        keys = RunKeys(run_id)
        flat = (part for field in fields.items() for part in field)
        await call(
            self._redis,
            "headrace_write_run",
            keys=(keys.run, keys.epoch),
            args=("" if self._incarnation is None else self._incarnation, *flat),
            timeout_s=_PATIENCE_S,
            waits_for_room=waits_for_room,
        )

    async def _read_each(self, commands: Sequence[tuple[str, ...]]) -> list[Any]:
        """Send several read-only commands in one round trip, and return their answers in order."""

        async def read() -> list[Any]:
            async with self._redis.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return await pipe.execute()

        found: list[Any] = await self._patiently(read, "reading run records")
        return found

    async def _make_consumer_group(self, stream: str, consumer_group: str) -> None:
        async def make() -> None:
            try:
                await self._redis.xgroup_create(stream, consumer_group, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

        await self._asked(make, f"creating consumer group {consumer_group}")

    async def _patiently(self, make: Any, what: str) -> Any:
        return await patiently(make, what=what, timeout_s=_PATIENCE_S)

    async def _asked(self, make: Any, what: str) -> Any:
        """Await ``make`` for a client's request. Without room it fails at once, so that the client gets the error."""
        return await patiently(make, what=what, timeout_s=_PATIENCE_S, waits_for_room=False)
