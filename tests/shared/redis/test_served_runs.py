"""One task for each run that is served."""

import asyncio

import msgspec
import pytest

from shared.redis.run_record import Progress, RunRecord
from shared.redis.served_runs import ServedRuns

pytestmark = pytest.mark.unit


class Serving:
    """Records the runs whose tasks began and ended. A run in ``brief`` ends by itself, and one in ``broken`` fails."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.brief: set[str] = set()
        self.broken: set[str] = set()
        self.runs = ServedRuns(self.serve, name="test of")

    async def serve(self, record: RunRecord) -> None:
        self.begun.append(record.run_id)
        try:
            if record.run_id in self.broken:
                raise ValueError(record.run_id)
            if record.run_id not in self.brief:
                await asyncio.Event().wait()
        finally:
            self.ended.append(record.run_id)

    async def follow(self, *run_ids: str) -> None:
        await self.runs.follow([msgspec.structs.replace(RECORD, run_id=run_id) for run_id in run_ids])
        await asyncio.sleep(0)


RECORD = RunRecord("", {}, "running", "run", "", 0.0, 0.0, None, "/nowhere", Progress())


async def test_a_run_has_one_task_from_its_first_look_to_its_last() -> None:
    serving = Serving()
    await serving.follow("a")
    await serving.follow("a", "b")
    assert (serving.begun, serving.ended) == (["a", "b"], [])
    await serving.follow("b")
    assert serving.ended == ["a"]
    await serving.runs.cancel()
    assert serving.ended == ["a", "b"]


async def test_a_task_that_ended_by_itself_begins_again() -> None:
    serving = Serving()
    serving.brief.add("a")
    await serving.follow("a")
    await serving.follow("a")
    assert serving.begun == ["a", "a"]


async def test_the_failure_of_a_task_is_raised_at_the_next_look() -> None:
    serving = Serving()
    serving.broken.add("a")
    await serving.follow("a")
    with pytest.raises(ValueError, match="a"):
        await serving.follow("a")


async def test_tasks_may_be_given_time_to_end() -> None:
    serving = Serving()
    await serving.follow("a")
    await serving.runs.wait(timeout_s=0.01)
    assert serving.ended == []
    await serving.runs.cancel()
