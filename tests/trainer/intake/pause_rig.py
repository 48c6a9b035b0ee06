"""Building blocks for tests of pauses: a failing grader, an observer of the run, and a trainer beside the test."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.trainer.groups.ledger import Ledger
from services.trainer.loop.training_loop import Ending, TrainingLoop
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_record import RunRecord
from shared.redis.run_store import RunStore
from tests.eventually import eventually
from tests.trainer.incarnations import newest_ledger, train, trained_groups
from tests.trainer.played import RUN_ID, FakeSender, PlayedServices


class Grader:
    """A reward function that can be broken and repaired, and that records which groups it failed."""

    def __init__(self, *, works: bool = True) -> None:
        self.works = works
        self.failed: set[int] = set()

    def __call__(self, label: str, branch: int) -> float | None:
        if self.works:
            return float(branch % 2)
        self.failed.add(int(label))
        return None


class Watcher:
    """Observes the run from outside, like its API."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.store = RunStore(redis)

    async def record(self) -> RunRecord:
        found = await self.store.get(RUN_ID)
        assert found is not None
        return found

    async def until(self, is_so: Callable[[RunRecord], bool]) -> RunRecord:
        """Wait until a condition on the run's record is true."""
        found: list[RunRecord] = []

        async def look() -> bool:
            found[:] = [await self.record()]
            return is_so(found[0])

        await eventually(look)
        return found[0]

    async def paused(self, by: str) -> RunRecord:
        return await self.until(lambda it: it.pause is not None and it.pause.by == by)

    async def reports(self, count: int) -> RunRecord:
        """Wait for this many more reports of the rank; each describes the state after this call."""
        for _ in range(count):
            last = (await self.record()).progress.updated_at_s
            await self.until(lambda it, last=last: it.progress.updated_at_s > last)  # type: ignore[misc]
        return await self.record()

    async def statuses(self) -> list[dict[str, Any]]:
        """Return the status events about pauses."""
        entries: Any = await self.redis.xrange(RunKeys(RUN_ID).events)
        return [json.loads(fields[b"data"]) for _, fields in entries if fields[b"kind"] == b"status"]


Training = Awaitable[tuple[Ending, TrainingLoop]]


@asynccontextmanager
async def training(
    redis: Redis,
    grader: Grader,
    *,
    terminate: asyncio.Event | None = None,
    meddle: Callable[[TrainingLoop], None] = lambda loop: None,
) -> AsyncGenerator[Training]:
    """Run one incarnation in the background; the test waits for its end."""
    played = PlayedServices(redis, reward=grader)
    task = asyncio.create_task(
        train(redis, played=played, sender=FakeSender(redis), terminate=terminate, meddle=meddle), name="training"
    )
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def assert_exact(ledger: Ledger, *, run_dir: Path, failed: set[int]) -> None:
    """Check that every admitted group was trained or dropped, once, and that just the failed ones were dropped."""
    kept = newest_ledger(run_dir)
    assert Ledger.from_json(kept).to_json() == ledger.to_json(), "the last checkpoint has the last word"
    trained = [number for groups in trained_groups(run_dir).values() for number in groups]
    assert len(trained) == len(set(trained)) == ledger.num_trained
    dropped = ledger.dropped_by_reason()
    assert dropped.get("unscorable", 0) == len(failed)
    assert not failed & set(trained)
    assert ledger.num_in_flight == 0
    assert ledger.admitted == ledger.num_trained + ledger.num_dropped
