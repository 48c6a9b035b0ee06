"""Prometheus gets the current run's newest metrics. Metrics that cannot be reported are refused at submit."""

import asyncio
import contextlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from prometheus_client import Gauge, generate_latest
from redis.exceptions import ConnectionError as RedisConnectionError

from services.trainer.fence import take_over
from services.trainer.groups.ledger import DEAD_LETTER
from services.trainer.intake.batch_builder import STALE, UNSCORABLE
from services.trainer.run_api import run_metrics
from services.trainer.run_api.run_metrics import DROPS_TO_WATCH, RunMetrics
from services.trainer.run_api.trainer_api import TrainerApi
from shared.errors import UnavailableError, UserError
from shared.install_commands import install_extras
from shared.redis.keys import GENERATORS, REWARDERS, RunKeys
from shared.redis.lease import renew
from shared.redis.redis_connection import Redis
from shared.redis.run_record import Progress
from tests.conftest import RedisServer
from tests.eventually import eventually

Run = dict[str, Any]


def training_series(metrics: RunMetrics) -> list[str]:
    text = generate_latest(metrics.registry).decode()
    return sorted(line for line in text.splitlines() if line.startswith("headrace_training"))


async def test_the_newest_metrics_of_the_current_run_are_served_until_it_is_no_longer_current(
    client: httpx.AsyncClient, api: TrainerApi, run: Run
) -> None:
    """A batch of two steps: the metrics of its rollouts are in the row of the first step."""
    run |= {"steps_per_generation": 2, "groups_per_step": 1}
    run_dir = Path((await client.post("/v1/runs", json=run)).json()["run"]["run_dir"])
    steps = [
        {"step": 3.0, "reward": 0.25, "rewards/accuracy_reward/mean": 0.25, "loss": 1.0, "kl": 1.0},
        {"step": 4.0, "loss": None, "groups/dropped/stale": 2.0, "of_another_release": 1.0},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    (run_dir / "evaluations.jsonl").write_text('{"step": 2.0, "eval_reward": 0.75}\n')
    metrics = RunMetrics(api.redis, store=api.store, supervisor=api.supervisor)

    await metrics.refresh()
    assert training_series(metrics) == [], "the run is queued"

    await api.store.set_current_run(run_dir.name)
    await metrics.refresh()
    assert training_series(metrics) == [
        f'headrace_training_eval_reward{{run_id="{run_dir.name}"}} 0.75',
        f'headrace_training_groups_dropped_by_reason{{reason="stale",run_id="{run_dir.name}"}} 2.0',
        f'headrace_training_kl_nats{{run_id="{run_dir.name}"}} 1.0',
        f'headrace_training_rewards_mean{{reward="accuracy_reward",run_id="{run_dir.name}"}} 0.25',
        f'headrace_training_reward{{run_id="{run_dir.name}"}} 0.25',
        f'headrace_training_step{{run_id="{run_dir.name}"}} 4.0',
    ]

    await api.store.set_current_run(None)
    await metrics.refresh()
    assert training_series(metrics) == []


async def test_no_run_ends_because_its_metrics_cannot_be_read(
    client: httpx.AsyncClient, api: TrainerApi, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = Path((await client.post("/v1/runs", json=run)).json()["run"]["run_dir"])
    await api.store.set_current_run(run_dir.name)
    (run_dir / "metrics.jsonl").mkdir()
    monkeypatch.setattr(run_metrics, "_REFRESH_S", 0.01)
    metrics = RunMetrics(api.redis, store=api.store, supervisor=api.supervisor)
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        await metrics.refresh()

    refreshing = asyncio.create_task(metrics.refresh_for_ever(), name="metrics")
    (run_dir / "evaluations.jsonl").write_text('{"step": 2.0, "eval_reward": 0.75}\n')
    await asyncio.wait({refreshing}, timeout=0.3)
    assert not refreshing.done()
    (run_dir / "metrics.jsonl").rmdir()

    async def are_served() -> bool:
        return bool(training_series(metrics))

    await eventually(are_served)
    refreshing.cancel()


async def test_a_connection_that_breaks_is_used_again_by_the_same_refresh(
    client: httpx.AsyncClient, api: TrainerApi, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis's own ConnectionError would end the metrics' task, and with it the trainer service."""
    run_id = (await client.post("/v1/runs", json=run)).json()["run"]["run_id"]
    await api.store.set_current_run(run_id)
    await take_over(api.redis, RunKeys(run_id))
    send = cast("Any", Redis.execute_command)
    broken: list[Any] = []

    async def break_each_command_once(redis: Redis, *args: Any, **options: Any) -> Any:
        if args[0] != "INFO" and args not in broken:  # refresh reports a missing INFO at once
            broken.append(args)
            raise RedisConnectionError("Connection closed by server.")
        return await send(redis, *args, **options)

    monkeypatch.setattr(Redis, "execute_command", break_each_command_once)
    metrics = RunMetrics(api.redis, store=api.store, supervisor=api.supervisor)
    await metrics.refresh()
    assert ("GET", RunKeys(run_id).epoch) in broken
    assert f'headrace_run_rank_starts{{run_id="{run_id}"}} 1.0' in generate_latest(metrics.registry).decode()


async def test_no_scrape_misses_a_series_while_they_are_set_again(
    client: httpx.AsyncClient, api: TrainerApi, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scrape runs in another thread. Begin one at each moment at which a series is missing."""
    run_id = (await client.post("/v1/runs", json=run)).json()["run"]["run_id"]
    await api.store.set_current_run(run_id)
    metrics = RunMetrics(api.redis, store=api.store, supervisor=api.supervisor)
    await metrics.refresh()
    scrapes: list[threading.Thread] = []
    missed: list[set[str]] = []

    def series() -> set[str]:
        lines = generate_latest(metrics.registry).decode().splitlines()
        return {line.rpartition(" ")[0] for line in lines if run_id in line}

    everything = series()
    assert f'headrace_run_step{{run_id="{run_id}"}}' in everything
    clear = Gauge.clear

    def clear_and_scrape(gauge: Gauge) -> None:
        clear(gauge)
        scrape = threading.Thread(target=lambda: missed.append(everything - series()))
        scrape.start()
        scrape.join(timeout=0.05)
        scrapes.append(scrape)

    monkeypatch.setattr(Gauge, "clear", clear_and_scrape)
    await metrics.refresh()
    for scrape in scrapes:
        scrape.join(timeout=120)
    assert len(missed) == len(scrapes) > 0
    assert set().union(*missed) == set()


async def test_unreadable_data_of_a_run_leaves_its_series_unchanged(
    client: httpx.AsyncClient, api: TrainerApi, run: Run
) -> None:
    run_id = (await client.post("/v1/runs", json=run)).json()["run"]["run_id"]
    await api.store.set_current_run(run_id)
    metrics = RunMetrics(api.redis, store=api.store, supervisor=api.supervisor)
    await metrics.refresh()
    before = generate_latest(metrics.registry)
    config = json.dumps({**run, "of_another_release": True})
    await cast("Any", api.redis.hset(RunKeys(run_id).run, "config", config))
    with pytest.raises(UserError, match="another release"):
        await metrics.refresh()
    of_the_run = [line for line in before.splitlines() if run_id.encode() in line]
    assert set(of_the_run) <= set(generate_latest(metrics.registry).splitlines())
    assert len(of_the_run) > 10


async def test_a_tracker_without_its_library_is_refused_at_submit(
    client: httpx.AsyncClient, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    reply = await client.post("/v1/runs", json={**run, "report_to": ["wandb"]})
    assert reply.status_code == 422
    (error,) = reply.json()["errors"]
    assert error["field"] == "report_to"
    assert "wandb cannot be used: not installed" in error["message"]
    assert install_extras("report") in error["message"]


async def test_generators_that_the_probe_took_out_are_seen_though_no_step_is_made(
    client: httpx.AsyncClient, api: TrainerApi, run: Run
) -> None:
    run_id = (await client.post("/v1/runs", json=run)).json()["run"]["run_id"]
    await api.store.set_current_run(run_id)
    await api.store.write_progress(run_id, Progress(pushes=3, pushes_confirmed=1, probes_failed=2, num_left_out=1))
    metrics = RunMetrics(api.redis, store=api.store, supervisor=api.supervisor)
    await metrics.refresh()
    served = generate_latest(metrics.registry).decode().splitlines()
    assert f'headrace_run_probes_failed{{run_id="{run_id}"}} 2.0' in served
    assert f'headrace_run_generators_left_out{{run_id="{run_id}"}} 1.0' in served
    assert f'headrace_run_pushes{{outcome="failed",run_id="{run_id}"}} 2.0' in served


async def test_a_rank_that_hangs_counts_neither_as_evaluating_nor_as_ending(
    client: httpx.AsyncClient, api: TrainerApi, run: Run
) -> None:
    run_id = (await client.post("/v1/runs", json=run)).json()["run"]["run_id"]
    await api.store.set_current_run(run_id)
    metrics = RunMetrics(api.redis, store=api.store, supervisor=api.supervisor)
    for written_s, shown in ((0.0, 1.0), (3600.0, 0.0)):
        progress = Progress(is_evaluating=True, is_ending=True, updated_at_s=time.time() - written_s)
        await api.store.write_progress(run_id, progress)
        await metrics.refresh()
        served = generate_latest(metrics.registry).decode().splitlines()
        assert f'headrace_run_evaluating{{run_id="{run_id}"}} {shown}' in served
        assert f'headrace_run_ending{{run_id="{run_id}"}} {shown}' in served


async def test_the_metrics_of_alerts_are_served_for_the_current_run(
    client: httpx.AsyncClient, api: TrainerApi, run: Run
) -> None:
    run_id = (await client.post("/v1/runs", json={**run, "max_staleness": 3})).json()["run"]["run_id"]
    await api.store.set_current_run(run_id)
    await renew(api.redis, leases=RunKeys(run_id).leases(REWARDERS), consumer="rewarder-0")
    metrics = RunMetrics(api.redis, store=api.store, supervisor=api.supervisor)
    await metrics.refresh()
    served = generate_latest(metrics.registry).decode().splitlines()
    assert f'headrace_run_max_staleness_steps{{run_id="{run_id}"}} 3.0' in served
    assert f'headrace_run_rewarders_alive{{run_id="{run_id}"}} 1.0' in served
    assert f'headrace_run_generators_serving{{run_id="{run_id}"}} 0.0' in served
    for reason in DROPS_TO_WATCH:
        assert f'headrace_run_groups{{outcome="dropped_{reason}",run_id="{run_id}"}} 0.0' in served
    numbers = {line.split("{")[0].split(" ")[0]: float(line.rpartition(" ")[2]) for line in served if line[0] != "#"}
    assert 0 < numbers["headrace_run_disk_free_bytes"] < numbers["headrace_run_disk_size_bytes"]


@pytest.mark.parametrize("num_alive", [0, 2])
async def test_the_sessions_replicas_of_a_run_with_tools_are_counted(
    client: httpx.AsyncClient, api: TrainerApi, run: Run, model_dir: Path, num_alive: int
) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ messages }}")
    body = run | {"tools": ["my_tools:add"], "prompt_as_message": True}
    run_id = (await client.post("/v1/runs", json=body)).json()["run"]["run_id"]
    await api.store.set_status(run_id, "running")
    await api.store.set_current_run(run_id)
    for number in range(num_alive):
        await renew(api.redis, leases=RunKeys(run_id).leases(GENERATORS), consumer=f"sessions-{number}")
    metrics = RunMetrics(api.redis, store=api.store, supervisor=api.supervisor)
    await metrics.refresh()
    served = generate_latest(metrics.registry).decode().splitlines()
    assert f'headrace_run_sessions_alive{{run_id="{run_id}"}} {num_alive}.0' in served
    assert (await client.get(f"/v1/runs/{run_id}")).json()["num_sessions"] == num_alive


def test_the_drops_to_watch_are_reasons_that_the_trainer_gives() -> None:
    assert {DEAD_LETTER, STALE, UNSCORABLE} == set(DROPS_TO_WATCH)


async def test_redis_is_seen_with_its_memory_and_its_file_and_when_it_is_away(
    api: TrainerApi, redis_server: RedisServer
) -> None:
    metrics = RunMetrics(api.redis, store=api.store, supervisor=api.supervisor)

    async def seen() -> dict[str, float]:
        with contextlib.suppress(UnavailableError):
            await metrics.refresh()
        lines = generate_latest(metrics.registry).decode().splitlines()
        return {
            name: float(value) for name, value in (line.split(" ") for line in lines if line[:15] == "headrace_redis_")
        }

    await api.redis.config_set("maxmemory", "64mb")
    first = await seen()
    assert first["headrace_redis_up"] == 1
    assert 0 < first["headrace_redis_memory_used_bytes"] < first["headrace_redis_memory_max_bytes"] == 64 * 1024 * 1024
    assert first["headrace_redis_aof_writing"] == 1
    redis_server.kill()
    try:
        assert await seen() == first | {"headrace_redis_up": 0}
    finally:
        redis_server.start()
