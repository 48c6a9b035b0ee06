"""Finds runs by the beginning of an id, or by name, without reading all runs.

    headrace:runs:by_id      ID         sorted as text, so ids with the same beginning are neighbours
    headrace:runs:by_name    NAME/ID    the same for the runs of one name

A run's entries are written before its record and may be out of date, so readers rely on the record.
"""

import functools
from collections.abc import Mapping
from typing import Any

from shared.redis.keys import RUNS_BY_ID, RUNS_BY_NAME
from shared.redis.redis_connection import Redis, patiently

_PATIENCE_S = 60.0


class RunIndex:
    """Finds run ids by their beginning or by name, and adds and removes entries of the index."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def beginning_with(self, text: str, *, limit: int) -> list[str]:
        """Return up to ``limit`` ids that begin with ``text``."""
        return await self._entries(RUNS_BY_ID, text, limit=limit)

    async def named(self, name: str, *, limit: int) -> list[str]:
        """Return up to ``limit`` ids of runs that have this name, or had it a moment ago."""
        start = f"{name}/"
        return [entry.removeprefix(start) for entry in await self._entries(RUNS_BY_NAME, start, limit=limit)]

    async def ids(self) -> set[str]:
        """Return all run ids in the index."""
        return set(await self._entries(RUNS_BY_ID, "", limit=-1))

    async def enter(self, names: Mapping[str, str | None]) -> None:
        """Add runs to the index.

        Args:
            names: The name of each run by its id; None for a run without a name.

        Raises:
            NoRoomError: Redis has no room.
        """
        # The id comes last, so that a run whose id is there has its name there too (RunStore.mend_lists).
        for key, entries in ((RUNS_BY_NAME, _entries_of(names)), (RUNS_BY_ID, [*names])):
            if entries:
                await self._asked(functools.partial(self._redis.zadd, key, dict.fromkeys(entries, 0.0)))

    async def leave(self, run_id: str, name: str | None) -> None:
        """Remove a run's id and name from the index. Raises NoRoomError if the disk of Redis is full."""
        await self._asked(lambda: self._redis.zrem(RUNS_BY_ID, run_id))
        await self.leave_name(run_id, name)

    async def leave_name(self, run_id: str, name: str | None) -> None:
        """Remove a run's entry under a name, such as its name before a change. If ``name`` is None, do nothing."""
        for entry in _entries_of({run_id: name}):
            await self._asked(lambda entry=entry: self._redis.zrem(RUNS_BY_NAME, entry))

    async def _entries(self, key: str, start: str, *, limit: int) -> list[str]:
        found = await patiently(
            lambda: self._redis.zrange(key, f"[{start}", f"[{start}\xff", bylex=True, offset=0, num=limit),
            what="looking up runs",
            timeout_s=_PATIENCE_S,
        )
        return [entry.decode() for entry in found]

    async def _asked(self, make: Any) -> None:
        await patiently(make, what="indexing runs", timeout_s=_PATIENCE_S, waits_for_room=False)


def _entries_of(names: Mapping[str, str | None]) -> list[str]:
    return [f"{name}/{run_id}" for run_id, name in names.items() if name is not None]
