"""The queue of runs: its limit, its cost, and its visibility."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest

from services.trainer.run_api.run_metrics import RunMetrics
from services.trainer.run_api.trainer_api import TrainerApi, make_api
from services.trainer.settings import TrainerSettings
from shared.redis.keys import QUEUED_RUNS, RUNS, SERVED_RUNS
from shared.redis.redis_connection import Redis
from shared.redis.run_record import Status
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.trainer.api_rig import serving, supervising, wait_until
from tests.trainer.rank_rig import RankPlan

Run = dict[str, Any]


async def make_queued(redis: Redis, config: RunConfig, *, count: int) -> list[str]:
    names = [f"run-{number:03d}" for number in range(count)]
    for name in names:
        await RunStore(redis).create(name, config, run_dir="unused")
    return names


async def num_commands(redis: Redis) -> int:
    """Return how many commands the server has executed."""
    return int((await redis.info("stats"))["total_commands_processed"])


async def test_a_submit_beyond_the_limit_is_refused_with_what_to_do_and_fits_when_one_was_stopped(
    settings: TrainerSettings, redis: Redis, run: Run
) -> None:
    narrow = settings.model_copy(update={"max_queued_runs": 2})
    async with serving(make_api(narrow, redis, stopping=asyncio.Event())) as client:
        first, _ = [(await client.post("/v1/runs", json=run)).json()["run"]["run_id"] for _ in range(2)]
        headers = {"Idempotency-Key": "third"}
        refused = await client.post("/v1/runs", json=run, headers=headers)
        assert (refused.status_code, refused.json()["type"]) == (429, "/problems/too-many-queued-runs")
        assert refused.headers["Retry-After"] == "60"
        assert "2 runs are queued already" in refused.json()["detail"]
        assert "HEADRACE_MAX_QUEUED_RUNS" in refused.json()["detail"]
        assert len(list(settings.runs_dir.iterdir())) == 2, "nothing is left of it on the disk"
        assert (await client.post("/v1/runs?dry_run=true", json=run)).status_code == 200

        await client.post(f"/v1/runs/{first}/stop")
        assert (await client.post("/v1/runs", json=run, headers=headers)).status_code == 202


async def test_a_run_whose_creation_stopped_half_way_takes_no_place_in_the_queue(
    settings: TrainerSettings, redis: Redis, run: Run
) -> None:
    for listed in (RUNS, QUEUED_RUNS):
        await redis.zadd(listed, {"run-half": 1.0})
    narrow = settings.model_copy(update={"max_queued_runs": 1})
    async with serving(make_api(narrow, redis, stopping=asyncio.Event())) as client:
        replies = [await client.post("/v1/runs", json=run) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [202, 429]


async def test_submits_at_the_same_moment_do_not_share_the_last_place(
    settings: TrainerSettings, redis: Redis, run: Run
) -> None:
    narrow = settings.model_copy(update={"max_queued_runs": 3})
    async with serving(make_api(narrow, redis, stopping=asyncio.Event())) as client:
        replies = await asyncio.gather(*(client.post("/v1/runs", json=run) for _ in range(6)))
    assert sorted(reply.status_code for reply in replies) == [202, 202, 202, 429, 429, 429]


async def test_a_run_is_on_the_list_of_where_it_stands_and_on_none_when_it_has_ended(
    redis: Redis, run_config: RunConfig
) -> None:
    store = RunStore(redis)
    await make_queued(redis, run_config, count=2)
    assert (await store.lists.queued(), await store.lists.served()) == (["run-000", "run-001"], [])
    await store.set_status("run-000", "running")
    assert (await store.lists.queued(), await store.lists.served()) == (["run-001"], ["run-000"])
    await store.set_status("run-000", "failed", reason="why")
    await store.delete("run-001")
    assert (await store.lists.queued(), await store.lists.served()) == ([], [])


async def test_lists_that_an_older_release_or_a_crash_left_wrong_are_mended_when_the_trainer_starts(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan, tmp_path: Path
) -> None:
    store = RunStore(redis)
    for name in ("run-000", "run-001"):
        await store.create(name, run_config, run_dir=str(tmp_path / name))
    await store.set_status("run-000", "finished")
    await redis.delete(QUEUED_RUNS)
    await redis.zadd(SERVED_RUNS, {"run-000": 1.0})

    async def are_both_over() -> bool:
        is_finished = (await store.statuses(["run-001"]))["run-001"] == "finished"
        return is_finished and await redis.exists(QUEUED_RUNS, SERVED_RUNS) == 0

    async with supervising(plan.settings(settings, "finish"), redis):
        await wait_until(are_both_over)


async def test_the_cost_per_second_does_not_grow_with_queued_or_ended_runs(
    api: TrainerApi, redis: Redis, run_config: RunConfig
) -> None:
    metrics = RunMetrics(redis, store=api.store, supervisor=api.supervisor)

    async def cost() -> int:
        """Return the number of commands to look for work and to refresh the metrics, for runs that were seen before."""
        await metrics.refresh()
        before = await num_commands(redis)
        await api.store.served()
        await metrics.refresh()
        return await num_commands(redis) - before

    for name in await make_queued(redis, run_config, count=40):
        await api.store.set_status(name, "finished")
    of_forty = await cost()
    for number in range(40):
        await api.store.create(f"run-more-{number}", run_config, run_dir="unused")
        await api.store.set_status(f"run-more-{number}", "stopped")
    assert await cost() == of_forty
    shown = generate_latest(metrics.registry).decode()
    assert 'headrace_runs{status="finished"} 40.0' in shown
    assert 'headrace_runs{status="stopped"} 40.0' in shown


async def test_a_failed_run_that_goes_on_is_no_longer_counted_as_failed(
    api: TrainerApi, redis: Redis, run_config: RunConfig
) -> None:
    metrics = RunMetrics(redis, store=api.store, supervisor=api.supervisor)
    await make_queued(redis, run_config, count=1)
    statuses: tuple[Status, ...] = ("failed", "queued", "running")
    for status in statuses:
        await api.store.set_status("run-000", status)
        await metrics.refresh()
        assert f'headrace_runs{{status="{status}"}} 1.0' in generate_latest(metrics.registry).decode()


async def test_pages_hold_every_run_once_though_some_were_created_in_the_same_moment(
    client: httpx.AsyncClient, redis: Redis, run_config: RunConfig
) -> None:
    names = await make_queued(redis, run_config, count=7)
    await redis.zadd(RUNS, dict.fromkeys(names[1:6], 1000.5))
    found: list[str] = []
    params = {"limit": "2"}
    while True:
        page = (await client.get("/v1/runs", params=params)).json()
        found += [listed["run_id"] for listed in page["runs"]]
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]
    assert found == ["run-006", "run-000", "run-005", "run-004", "run-003", "run-002", "run-001"]


@pytest.mark.parametrize("cursor", ["bmFuIHJ1bi1h", "aW5mIHJ1bi1h"])  # "nan run-a", "inf run-a"
async def test_a_cursor_that_is_not_a_time_is_refused(client: httpx.AsyncClient, cursor: str) -> None:
    reply = await client.get("/v1/runs", params={"cursor": cursor})
    assert (reply.status_code, reply.json()["type"]) == (400, "/problems/bad-cursor")
