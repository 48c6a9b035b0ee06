"""Finds runs by status, name and tags, newest first, a page at a time.

    candidates, a few at once --statuses--> those with the right status --records--> those with the right name and tags

Runs that have not ended are on separate lists, so that listing them costs the same however many runs have ended. With
other filters a request looks at a bounded number of runs, and returns where the next request continues. A page may
therefore have fewer runs than its limit, even none, without being the last.
"""

from collections.abc import Collection
from dataclasses import dataclass

from shared.redis.run_lists import lists_of
from shared.redis.run_record import RunRecord, Status
from shared.redis.run_store import RunStore

Position = tuple[float, str]
"""When a run was created in Unix seconds, and its id."""
_AT_ONCE = 200
_MAX_LOOKED_AT = 2000


@dataclass(frozen=True)
class FoundRuns:
    """A page of runs, and where the next page begins.

    Args:
        records: Newest first.
        next_before: The next page has only runs that were created before this position; None on the last page.
    """

    records: list[RunRecord]
    next_before: Position | None


@dataclass(frozen=True)
class Wanted:
    """A filter for runs: by status, name and tags.

    Args:
        statuses: The wanted statuses; an empty set means any.
        name: The wanted name; None means any.
        tags: The tags that a run must all have.
    """

    statuses: frozenset[Status] = frozenset()
    name: str | None = None
    tags: frozenset[str] = frozenset()

    def includes(self, record: RunRecord) -> bool:
        """Return whether a run passes the filter."""
        return (
            (not self.statuses or record.status in self.statuses)
            and (self.name is None or record.name == self.name)
            and self.tags <= set(record.tags)
        )


async def find_runs(store: RunStore, wanted: Wanted, *, limit: int, before: Position | None) -> FoundRuns:
    """Return up to ``limit`` wanted runs created before ``before`` (None: from the newest on), newest first."""
    found = dict[Position, RunRecord]()
    at_once, num_looked_at = max(limit + 1, 0 if wanted == Wanted() else _AT_ONCE), 0
    while num_looked_at < max(_MAX_LOOKED_AT, limit + 1):
        looked_at = await _page(store, before=before, statuses=wanted.statuses, limit=at_once)
        found |= await _fitting(store, looked_at, wanted)
        if len(found) > limit:
            page = list(found)[:limit]
            return FoundRuns([found[position] for position in page], page[-1])
        if len(looked_at) < at_once:
            return FoundRuns(list(found.values()), None)
        num_looked_at += len(looked_at)
        before = looked_at[-1]
    return FoundRuns(list(found.values()), before)


async def _page(
    store: RunStore, *, before: Position | None, statuses: Collection[Status], limit: int
) -> list[Position]:
    pages = [await store.page(limit=limit, before=before, key=key) for key in lists_of(statuses)]
    return sorted({position for page in pages for position in page}, reverse=True)[:limit]


async def _fitting(store: RunStore, positions: list[Position], wanted: Wanted) -> dict[Position, RunRecord]:
    run_ids = [run_id for _, run_id in positions]
    if wanted.statuses:
        known = await store.statuses(run_ids)
        run_ids = [run_id for run_id in run_ids if known.get(run_id) in wanted.statuses]
    records = {record.run_id: record for record in await store.get_all(run_ids) if wanted.includes(record)}
    return {position: records[position[1]] for position in positions if position[1] in records}
