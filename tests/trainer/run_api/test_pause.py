"""Pausing and resuming over HTTP: the request is stored in Redis, and the response shows the training rank's state."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest

from services.trainer.run_api.run_metrics import RunMetrics
from services.trainer.run_api.trainer_api import TrainerApi, make_api
from services.trainer.settings import TrainerSettings
from shared.errors import NoRoomError
from shared.pause import Pause, Wishes
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.lease import renew
from shared.redis.redis_connection import Redis, connect
from shared.redis.redis_readiness import wait_until_ready
from shared.redis.run_record import Progress
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.conftest import RedisServer, write_until_refused
from tests.trainer.api_rig import supervising, wait_until
from tests.trainer.rank_rig import RankPlan

Run = dict[str, Any]
FAILING = Pause(
    by="rewards",
    reason="reward function judge failed for 75% of the completions of the last 16 groups",
    since_s=1000.0,
    paused_before_s=10.0,
    reward_func="judge",
    failed_ratio=0.75,
    last_failure="timeout took longer than 30 s",
)
ASKED = Pause(by="user", reason="a user asked for it", since_s=1000.0)


@pytest.fixture
def store(redis: Redis) -> RunStore:
    return RunStore(redis)


@pytest.fixture
async def run_id(client: httpx.AsyncClient, run: Run, redis: Redis, store: RunStore) -> str:
    """Return a run that its rank is training, with a generator."""
    run_id = str((await client.post("/v1/runs", json=run)).json()["run"]["run_id"])
    await store.set_current_run(run_id)
    await store.set_status(run_id, "running")
    await store.write_progress(run_id, Progress(waiting_for="scored groups", updated_at_s=time.time()))
    keys = RunKeys(run_id)
    await redis.hset(keys.generators, "generator-0", '{"url": "http://127.0.0.1:1"}')
    await renew(redis, leases=keys.leases(GENERATORS), consumer="generator-0")
    return run_id


@pytest.mark.parametrize(
    ("max_steps", "step", "is_ending"),
    [(4, 4, True), (4, 4, False), (4, 2, True), (0, 0, False)],
    ids=["all steps made", "its rank starts again", "no more improvement", "it only evaluates, and its rank starts"],
)
async def test_a_run_without_steps_left_cannot_be_paused(
    client: httpx.AsyncClient, store: RunStore, run: Run, tmp_path: Path, max_steps: int, step: int, *, is_ending: bool
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "1 + 1 =", "solution": "2"}\n')
    body = run | {"max_steps": max_steps, "eval_dataset_name": str(held_out), "eval_on_start": True}
    run_id = (await client.post("/v1/runs", json=body)).json()["run"]["run_id"]
    assert (await client.post(f"/v1/runs/{run_id}/pause")).status_code == 202, "a queued run can be held back"
    await client.post(f"/v1/runs/{run_id}/resume")
    await store.set_status(run_id, "running")
    progress = Progress(step=step, max_steps=max_steps, is_ending=is_ending, updated_at_s=time.time())
    await store.write_progress(run_id, progress)
    reply = await client.post(f"/v1/runs/{run_id}/pause")
    assert (reply.status_code, reply.json()["title"]) == (409, "Run is ending")
    assert "ends after its last push, checkpoint and evaluation" in reply.json()["detail"]


async def shown(client: httpx.AsyncClient, run_id: str) -> Run:
    """Return the run as GET shows it, which must equal its entry in the list."""
    answer: Run = (await client.get(f"/v1/runs/{run_id}")).json()
    (listed,) = [it for it in (await client.get("/v1/runs")).json()["runs"] if it["run_id"] == run_id]
    assert listed.items() <= answer.items()
    return answer


async def test_a_run_is_asked_to_pause_and_shown_as_paused_once_its_rank_confirms_it(
    client: httpx.AsyncClient, run_id: str, store: RunStore
) -> None:
    asked = await client.post(f"/v1/runs/{run_id}/pause")
    again = await client.post(f"/v1/runs/{run_id}/pause")
    for reply in (asked, again):
        assert reply.status_code == 202
        assert (reply.json()["status"], reply.json()["desired"]) == ("running", "pause")
        assert reply.json()["waiting_for"] == "its training rank to finish its batch and pause"
    assert await store.wishes(run_id) == Wishes("pause", 0)

    await store.write_pause(run_id, ASKED)
    paused = await shown(client, run_id)
    assert (paused["status"], paused["reason"]) == ("paused", "a user asked for it")
    assert paused["pause"] == {
        "by": "user", "since_s": 1000.0, "reward_func": None, "failed_ratio": 0.0, "last_failure": "",
    }  # fmt: skip
    assert paused["waiting_for"] == "a user to resume it"
    assert paused["started_at_s"] == asked.json()["started_at_s"]

    resumed = await client.post(f"/v1/runs/{run_id}/resume")
    assert resumed.status_code == 202
    assert (resumed.json()["status"], resumed.json()["desired"]) == ("paused", "run")
    assert resumed.json()["waiting_for"] == "its training rank to continue"
    assert await store.wishes(run_id) == Wishes("run", 1)
    await store.write_pause(run_id, None)
    going_on = await shown(client, run_id)
    assert (going_on["status"], going_on["reason"], going_on["pause"]) == ("running", "", None)
    assert going_on["started_at_s"] == asked.json()["started_at_s"], "it is the same start"


async def test_a_run_that_its_rewards_paused_is_shown_with_the_function_and_what_it_said(
    client: httpx.AsyncClient, run_id: str, store: RunStore
) -> None:
    await store.write_pause(run_id, FAILING)
    waiting_for = "reward function judge to work again; one group every 5 s tests it"
    await store.write_progress(run_id, Progress(waiting_for=waiting_for, updated_at_s=time.time()))
    paused = await shown(client, run_id)
    assert (paused["status"], paused["desired"], paused["reason"]) == ("paused", "run", FAILING.reason)
    assert paused["pause"] == {
        "by": "rewards", "since_s": 1000.0, "reward_func": "judge", "failed_ratio": 0.75,
        "last_failure": "timeout took longer than 30 s",
    }  # fmt: skip
    assert paused["waiting_for"] == waiting_for
    assert (await client.post(f"/v1/runs/{run_id}/resume")).json()["status"] == "paused"
    assert await store.wishes(run_id) == Wishes("run", 1), "a rank that is restarted sees it"


@pytest.mark.parametrize("wish", ["pause", "resume", "stop"])
async def test_a_run_is_paused_resumed_and_stopped_although_redis_is_full(
    client: httpx.AsyncClient, run_id: str, redis: Redis, store: RunStore, wish: str
) -> None:
    """The HTTP client of these tests waits for 20 s. Redis has no room for longer than that."""
    await redis.config_set("maxmemory", "1kb")
    try:
        reply = await client.post(f"/v1/runs/{run_id}/{wish}")
    finally:
        await redis.config_set("maxmemory", "0")
    assert reply.status_code == 202
    assert (await store.wishes(run_id)).desired == {"resume": "run"}.get(wish, wish)


async def test_a_queued_run_is_stopped_although_redis_is_full(
    client: httpx.AsyncClient, run: Run, redis: Redis
) -> None:
    run_id = (await client.post("/v1/runs", json=run)).json()["run"]["run_id"]
    await redis.config_set("maxmemory", "1kb")
    try:
        reply = await client.post(f"/v1/runs/{run_id}/stop")
    finally:
        await redis.config_set("maxmemory", "0")
    assert (reply.status_code, reply.json()["status"]) == (202, "stopped")


async def test_while_redis_cannot_write_to_its_disk_a_request_fails_at_once_with_the_reason(
    run_config: RunConfig, settings: TrainerSettings, tmp_path: Path
) -> None:
    """The supervisor, which has a run to start, does not keep the request waiting either."""
    server = RedisServer(tmp_path)
    server.start()
    redis = connect(server.url)
    try:
        await wait_until_ready(redis, timeout_s=120)
        await RunStore(redis).create("run-a", run_config, run_dir=str(tmp_path / "run-a"))
        server.fill_disk()
        await write_until_refused(redis)
        async with supervising(settings, redis) as api, asyncio.timeout(120):
            with pytest.raises(NoRoomError, match="Redis cannot write to its disk"):
                await api.supervisor.pause_run("run-a")
        server.free_disk()
    finally:
        await redis.aclose()
        server.kill()


async def test_a_run_that_was_asked_to_stop_or_has_ended_refuses_to_be_paused_or_resumed(
    client: httpx.AsyncClient, run_id: str, store: RunStore
) -> None:
    await client.post(f"/v1/runs/{run_id}/stop")
    for wish in ("pause", "resume"):
        reply = await client.post(f"/v1/runs/{run_id}/{wish}")
        assert (reply.status_code, reply.json()["type"]) == (409, "/problems/run-is-stopping")
        assert reply.json()["run_id"] == run_id
        assert (await store.wishes(run_id)).desired == "stop"
    await store.write_progress(run_id, Progress(step=3, max_steps=4))
    await store.set_status(run_id, "stopped")
    for wish in ("pause", "resume"):
        reply = await client.post(f"/v1/runs/{run_id}/{wish}")
        assert reply.status_code == 409
        assert reply.json()["type"] == "/problems/run-ended"
        assert (f"`headrace submit --from {run_id}`" in reply.json()["detail"]) is (wish == "resume")
        assert reply.json()["run_id"] == run_id
    assert (await shown(client, run_id))["pause"] is None


async def test_a_pause_is_over_when_the_run_ends(client: httpx.AsyncClient, run_id: str, store: RunStore) -> None:
    await store.write_pause(run_id, FAILING)
    await store.set_status(run_id, "stopped")
    ended = await shown(client, run_id)
    assert (ended["status"], ended["reason"], ended["pause"]) == ("stopped", "", None)


async def test_pauses_are_gauges_of_the_current_run(
    client: httpx.AsyncClient, api: TrainerApi, run_id: str, store: RunStore
) -> None:
    metrics = RunMetrics(api.redis, store=store, supervisor=api.supervisor)
    await store.write_pause(run_id, FAILING)
    await store.write_progress(run_id, Progress(paused_s=12.5))
    await metrics.refresh()
    served = generate_latest(metrics.registry).decode().splitlines()
    assert f'headrace_run_paused{{by="rewards",run_id="{run_id}"}} 1.0' in served
    assert f'headrace_run_paused{{by="user",run_id="{run_id}"}} 0.0' in served
    assert f'headrace_run_paused_seconds{{run_id="{run_id}"}} 12.5' in served
    assert 'headrace_runs{status="paused"} 1.0' in served
    assert 'headrace_runs{status="running"} 0.0' in served


async def status(api: TrainerApi, run_id: str) -> str:
    record = await api.store.get(run_id)
    assert record is not None
    return record.status


async def test_a_queued_run_that_was_paused_lets_others_go_first_until_it_is_resumed(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, tmp_path: Path
) -> None:
    settings = RankPlan(tmp_path).settings(settings, "finish")
    before = make_api(settings, redis, stopping=asyncio.Event())
    await before.store.create("run-a", run_config, run_dir=str(tmp_path / "run-a"))
    await before.supervisor.pause_run("run-a")
    await before.store.create("run-b", run_config, run_dir=str(tmp_path / "run-b"))
    async with supervising(settings, redis) as api:

        async def is_finished(run_id: str) -> bool:
            return await status(api, run_id) == "finished"

        await wait_until(lambda: is_finished("run-b"))
        assert await status(api, "run-a") == "queued"
        await api.supervisor.resume_run("run-a")
        await wait_until(lambda: is_finished("run-a"))


async def test_a_paused_run_keeps_the_fleet_and_its_rank_over_a_restart_of_the_service(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, tmp_path: Path
) -> None:
    plan = RankPlan(tmp_path)
    settings = plan.settings(settings, "work")
    async with supervising(settings, redis) as api:
        record = await api.store.create("run-a", run_config, run_dir=str(tmp_path / "run-a"))
        api.supervisor.wake()
        await wait_until(plan.is_at_work)
        await api.store.write_pause("run-a", ASKED)
        await api.store.create("run-b", run_config, run_dir=str(tmp_path / "run-b"))
    assert record.pause is None
    async with supervising(settings, redis) as api:
        await wait_until(lambda: len(plan.pids()) == 2 and plan.is_at_work())
        found = await api.store.get("run-a")
        assert found is not None
        assert (found.status, found.pause) == ("paused", ASKED)
        assert await api.store.current_run() == "run-a"
        assert await status(api, "run-b") == "queued"
        await api.supervisor.stop_run("run-a")
        await wait_until(lambda: len(plan.pids()) == 3)  # the next run's


async def test_a_rank_that_crashes_while_its_run_is_paused_does_not_use_up_the_restarts(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, tmp_path: Path
) -> None:
    plan = RankPlan(tmp_path)
    num_crashes = settings.max_restarts_without_progress + 3
    store = RunStore(redis)
    await store.create("run-a", run_config, run_dir=str(tmp_path / "run-a"))
    await store.write_pause("run-a", ASKED)
    async with supervising(plan.settings(settings, "exit=1 " * num_crashes + "finish"), redis) as api:

        async def has_ended() -> bool:
            return await status(api, "run-a") in ("finished", "failed")

        await wait_until(has_ended)
        assert await status(api, "run-a") == "finished"
