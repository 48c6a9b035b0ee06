"""Lists of the runs that have not ended: queued runs, and runs that the fleet serves.

    created --> queued --> served (running, paused) --> on no list

A service that follows runs reads only the runs that concern it, however many are queued or have ended. A list may have
one run too many for a moment, or after a crash until the trainer starts again. It never has one too few: a run is
listed before its record says so, and is removed after. Readers rely on the record.
"""

from collections.abc import Collection, Mapping

from shared.redis.keys import QUEUED_RUNS, RUNS, SERVED_RUNS
from shared.redis.redis_connection import Redis, call, patiently

_LIST_OF = {"queued": QUEUED_RUNS, "running": SERVED_RUNS, "paused": SERVED_RUNS}
_PATIENCE_S = 60.0


def lists_of(statuses: Collection[str]) -> tuple[str, ...]:
    """Return the keys of the lists that contain all runs with these statuses, in the order in which to read them.

    A run moves from the queue to the served runs. In this order a reader does not miss it on the way.
    """
    found = {_LIST_OF.get(status, RUNS) for status in statuses} or {RUNS}
    return (RUNS,) if RUNS in found else tuple(key for key in (QUEUED_RUNS, SERVED_RUNS) if key in found)


class RunLists:
    """Reads and updates the lists of queued and of served runs in Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def queued(self) -> list[str]:
        """Return the ids of the runs that wait for their turn, oldest first."""
        return await self._members(QUEUED_RUNS)

    async def served(self) -> list[str]:
        """Return the ids of the runs that are running or paused, oldest first."""
        return await self._members(SERVED_RUNS)

    async def enter(self, run_id: str, status: str, *, waits_for_room: bool) -> None:
        """Add a run to the list of the status that it is about to get, if that status has a list."""
        if (to := _LIST_OF.get(status)) is None:
            return
        created_at_s = await patiently(
            lambda: self._redis.zscore(RUNS, run_id), what="reading when the run was created", timeout_s=_PATIENCE_S
        )
        if created_at_s is not None:  # None: the run was deleted
            await call(
                self._redis,
                "headrace_list_run",
                keys=(to,),
                args=(run_id, repr(created_at_s)),
                waits_for_room=waits_for_room,
            )

    async def leave_others(self, run_id: str, status: str, *, waits_for_room: bool) -> None:
        """Remove a run that now has this status from all other lists."""
        for other in {QUEUED_RUNS, SERVED_RUNS} - {_LIST_OF.get(status)}:
            await self._remove(other, run_id, waits_for_room=waits_for_room)

    async def mend(self, statuses: Mapping[str, str]) -> None:
        """Put each of these runs on the list of its status, and on no other.

        Raises:
            NoRoomError: The disk of Redis is full.
        """
        for name in (QUEUED_RUNS, SERVED_RUNS):
            for run_id in await self._members(name):
                if run_id in statuses and _LIST_OF.get(statuses[run_id]) != name:
                    await self._remove(name, run_id, waits_for_room=False)
        for run_id, status in statuses.items():
            await self.enter(run_id, status, waits_for_room=False)

    async def _members(self, name: str) -> list[str]:
        members = await patiently(lambda: self._redis.zrange(name, 0, -1), what="listing runs", timeout_s=_PATIENCE_S)
        return [member.decode() for member in members]

    async def _remove(self, name: str, run_id: str, *, waits_for_room: bool) -> None:
        await patiently(
            lambda: self._redis.zrem(name, run_id),
            what="unlisting the run",
            timeout_s=_PATIENCE_S,
            waits_for_room=waits_for_room,
        )
