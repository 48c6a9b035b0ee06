"""Lists runs in another order than newest first, a page at a time.

    wanted runs --a few records at once--> their places in the order --the first after the cursor--> records of a page

The order of names, statuses and steps is in no list in Redis, so each page looks at every run, a few at a time, and
keeps the places of those that are wanted; more than MAX_SORTED of them are refused. A run that changes between two
pages, for example because it starts, may be missed or come twice.
"""

import heapq
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from services.trainer.problems import Problem
from services.trainer.run_api.listing.run_listing import Position, Wanted, find_runs
from shared.redis.run_record import RunRecord
from shared.redis.run_store import RunStore

MAX_SORTED = 10_000
_AT_ONCE = 200
Sort = Literal["created", "started", "ended", "name", "status", "step"]
Place = tuple[bool, float | str, float, str]
"""Whether the run lacks the value, the value, minus when it was created, and its id."""


@dataclass(frozen=True)
class SortedRuns:
    """A page of sorted runs, and where the next page begins.

    Args:
        records: The runs of the page, in the requested order.
        next_after: The place after which the next page begins; None on the last page.
    """

    records: list[RunRecord]
    next_after: Place | None


def _latest_first(seconds: float | None) -> float | None:
    return None if seconds is None else -seconds


_VALUES: Final[Mapping[Sort, Callable[[RunRecord], float | str | None]]] = {
    "created": lambda record: -record.created_at_s,
    "started": lambda record: _latest_first(record.started_at_s),
    "ended": lambda record: _latest_first(record.ended_at_s),
    "name": lambda record: record.name,
    "status": lambda record: record.status,
    "step": lambda record: float(-record.progress.step),
}
"""The values that the orders compare: the latest or most steps first; names and statuses by the alphabet."""


async def sorted_runs(store: RunStore, wanted: Wanted, *, sort: Sort, limit: int, after: Place | None) -> SortedRuns:
    """Return up to ``limit`` wanted runs in the order of ``sort``, after the place ``after`` (None: from the first).

    Runs without a value, such as a start or a name, come last.

    Raises:
        Problem: 422 if more than MAX_SORTED runs are wanted.
    """
    places = [_place(record, sort) async for record in _wanted(store, wanted, sort=sort)]
    page = heapq.nsmallest(limit + 1, (place for place in places if after is None or place > after))
    records = await store.get_all([run_id for *_, run_id in page[:limit]])
    return SortedRuns(records, page[limit - 1] if len(page) > limit else None)


async def _wanted(store: RunStore, wanted: Wanted, *, sort: Sort) -> AsyncGenerator[RunRecord]:
    before: Position | None = None
    num_found = 0
    while True:
        found = await find_runs(store, wanted, limit=_AT_ONCE, before=before)
        num_found += len(found.records)
        if num_found > MAX_SORTED:
            raise Problem(
                422,
                "Too many runs to sort",
                f"More than {MAX_SORTED} runs would have to be read to sort them by {sort}. Ask for fewer with status, "
                "name or tag, or leave sort out for the newest first.",
            )
        for record in found.records:
            yield record
        if found.next_before is None:
            return
        before = found.next_before


def _place(record: RunRecord, sort: Sort) -> Place:
    value = _VALUES[sort](record)
    missing: float | str = "" if sort in ("name", "status") else 0.0
    return value is None, missing if value is None else value, -record.created_at_s, record.run_id
