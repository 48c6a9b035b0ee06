"""The supervisor: one run at a time, and a training rank that is restarted, but not for ever."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from services.trainer.run_api.trainer_api import TrainerApi, make_api
from services.trainer.settings import TrainerSettings
from shared.redis.redis_connection import Redis
from shared.redis.run_record import Progress, RunRecord
from shared.run_options.run_config import RunConfig
from shared.service import stopped_processes
from tests.conftest import RedisServer
from tests.trainer.api_rig import supervising, wait_until
from tests.trainer.rank_rig import RankPlan, is_alive


async def submit(api: TrainerApi, config: RunConfig, run_id: str = "run-a") -> RunRecord:
    record = await api.store.create(run_id, config, run_dir=str(api.settings.runs_dir / run_id))
    api.supervisor.wake()
    return record


async def when(api: TrainerApi, status: str, run_id: str = "run-a") -> RunRecord:
    """Wait until the run has this status."""
    found: list[RunRecord] = []

    async def has_status() -> bool:
        record = await api.store.get(run_id)
        assert record is not None
        found[:] = [record]
        return record.status == status

    await wait_until(has_status)
    return found[0]


async def test_a_rank_that_crashes_is_started_again_until_the_run_is_finished(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    async with supervising(plan.settings(settings, "exit=1 exit=1 exit=1 finish"), redis) as api:
        record = await submit(api, run_config)
        assert (await when(api, "finished")).reason == ""
        assert len(plan.pids()) == 4
        assert api.supervisor.keeper.num_restarts == 3
        await wait_until(lambda: api.supervisor.keeper.rank is None)

        async def fleet_is_free() -> bool:
            return await api.store.current_run() is None

        await wait_until(fleet_is_free)
    log = (Path(record.run_dir) / "rank.log").read_text()
    assert [line.split()[1] for line in log.splitlines() if line.startswith("start")] == ["1", "2", "3", "4"]


async def test_a_rank_that_makes_no_progress_is_given_up_with_its_last_words(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    async with supervising(plan.settings(settings, "exit=1"), redis) as api:
        record = await submit(api, run_config)
        failed = await when(api, "failed")
    assert len(plan.pids()) == 6  # the first start and five restarts
    assert failed.reason == (
        "the training rank crashed with exit status 1 6 times without completing a step. "
        f"It last said: the model is not there. Its log is {record.run_dir}/rank.log"
    )


async def test_every_new_step_gives_a_rank_its_restarts_back(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    few = plan.settings(settings, "step=1 step=2 step=3 step=4 finish")
    async with supervising(few.model_copy(update={"max_restarts_without_progress": 1}), redis) as api:
        await submit(api, run_config)
        await when(api, "finished")
    assert len(plan.pids()) == 5


async def test_a_rank_that_dies_at_the_same_step_again_and_again_is_given_up(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    async with supervising(plan.settings(settings, "step=3 step=2"), redis) as api:
        await submit(api, run_config)
        failed = await when(api, "failed")
    assert len(plan.pids()) == 6
    assert "the numbers are wrong" in failed.reason


async def test_a_rank_that_exits_cleanly_without_an_outcome_has_not_finished_the_run(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    async with supervising(plan.settings(settings, "exit=0"), redis) as api:
        await submit(api, run_config)
        assert "exited without finishing the run" in (await when(api, "failed")).reason


async def test_a_rank_that_refuses_is_not_started_again_and_its_reason_stays(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    async with supervising(plan.settings(settings, "refuse"), redis) as api:
        await submit(api, run_config)
        assert (await when(api, "failed")).reason == "the dataset is gone"
    assert len(plan.pids()) == 1


async def test_a_rank_that_refuses_without_writing_why_is_quoted(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    async with supervising(plan.settings(settings, "exit=2"), redis) as api:
        await submit(api, run_config)
        assert (await when(api, "failed")).reason == "the model is not there"
    assert len(plan.pids()) == 1


async def test_a_fenced_rank_is_left_to_the_trainer_that_has_the_run(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    async with supervising(plan.settings(settings, "exit=3 finish"), redis) as api:
        await submit(api, run_config, "run-a")
        await wait_until(lambda: len(plan.pids()) == 1 and api.supervisor.keeper.rank is None)
        await submit(api, run_config, "run-b")
        assert (await when(api, "queued", "run-b")).status == "queued"
        assert await api.store.current_run() == "run-a"
        await api.store.set_status("run-a", "finished")  # by the other trainer
        api.supervisor.wake()
        await when(api, "finished", "run-b")
    assert len(plan.pids()) == 2


@pytest.mark.parametrize("asked", ["resume_run", "stop_run"])
async def test_a_fenced_run_is_served_here_again_once_a_user_asks_for_it(
    asked: str, settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    async with supervising(plan.settings(settings, "exit=3 finish"), redis) as api:
        await submit(api, run_config, "run-a")
        await wait_until(lambda: len(plan.pids()) == 1 and api.supervisor.keeper.rank is None)
        await getattr(api.supervisor, asked)("run-a")
        await when(api, "finished", "run-a")
    assert len(plan.pids()) == 2


async def test_a_rank_that_cannot_be_started_fails_the_run_with_the_command(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig
) -> None:
    wrong = settings.model_copy(update={"rank_command": ["/nowhere/rank"]})
    async with supervising(wrong, redis) as api:
        await submit(api, run_config)
        reason = (await when(api, "failed")).reason
    assert "could not be started" in reason
    assert "/nowhere/rank" in reason


async def test_a_rank_whose_log_cannot_be_opened_is_started_once_it_can(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    patient = plan.settings(settings, "finish").model_copy(update={"max_restarts_without_progress": 100_000})
    in_its_place = settings.runs_dir / "run-a" / "rank.log"
    in_its_place.mkdir(parents=True)
    async with supervising(patient, redis) as api:
        await submit(api, run_config)
        await wait_until(lambda: "which could not be started" in api.supervisor.keeper.note("run-a"), timeout_s=60)
        in_its_place.rmdir()
        await when(api, "finished")
    assert len(plan.pids()) == 1


async def test_a_rank_whose_log_can_never_be_opened_is_given_up(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    (settings.runs_dir / "run-a" / "rank.log").mkdir(parents=True)
    async with supervising(plan.settings(settings, "finish"), redis) as api:
        await submit(api, run_config)
        reason = (await when(api, "failed")).reason
    assert "could not be started ([Errno 21] Is a directory: " in reason
    assert "6 times without completing a step" in reason


async def test_runs_have_the_fleet_one_after_the_other_oldest_first(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    async with supervising(plan.settings(settings, "work finish"), redis) as api:
        await submit(api, run_config, "run-b")
        await wait_until(plan.is_at_work)
        await submit(api, run_config, "run-a")
        assert await api.store.current_run() == "run-b"
        assert (await when(api, "queued", "run-a")).started_at_s is None
        await api.supervisor.stop_run("run-b")
        await when(api, "stopped", "run-b")
        await when(api, "finished", "run-a")


async def test_a_run_asked_to_stop_is_stopped_by_its_rank(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    async with supervising(plan.settings(settings, "work"), redis) as api:
        await submit(api, run_config)
        await wait_until(plan.is_at_work)
        await api.supervisor.stop_run("run-a")
        await when(api, "stopped")
        await wait_until(lambda: not is_alive(plan.pids()[0]))
    assert len(plan.pids()) == 1


async def test_a_run_asked_to_stop_while_its_rank_is_down_does_not_wait_for_it(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    patient = {"first_backoff_s": 60.0, "last_backoff_s": 60.0}
    async with supervising(plan.settings(settings, "exit=1").model_copy(update=patient), redis) as api:
        record = await submit(api, run_config)
        await wait_until(lambda: "crashed with exit status 1" in api.supervisor.keeper.note("run-a"))
        await api.supervisor.stop_run("run-a")
        stopped = await when(api, "stopped")
        assert "while its training rank was down" in stopped.reason
        assert record.run_dir in stopped.reason
        await wait_until(lambda: api.supervisor.keeper.note("run-a") == "")


async def test_a_crash_is_the_reason_for_waiting_until_the_next_rank_trains(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    async with supervising(plan.settings(settings, "exit=1 stubborn"), redis) as api:
        await submit(api, run_config)
        await wait_until(plan.is_at_work)
        assert api.supervisor.keeper.note("run-a") == (
            "its training rank, which crashed with exit status 1 and is being restarted; "
            "it last said: the model is not there"
        )
        await api.store.write_progress("run-a", Progress(starting="loading the model", updated_at_s=time.time()))
        looks_over_at = time.monotonic() + 10 * api.settings.supervise_every_s
        await wait_until(lambda: time.monotonic() > looks_over_at)
        assert api.supervisor.keeper.note("run-a"), "it may crash at the same place again"
        await api.store.write_progress("run-a", Progress(updated_at_s=time.time()))
        await wait_until(lambda: api.supervisor.keeper.note("run-a") == "")


async def test_a_run_found_running_gets_its_rank_again(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    api = make_api(settings, redis, stopping=asyncio.Event())
    await submit(api, run_config, "run-queued")
    await submit(api, run_config, "run-killed")
    await api.store.set_status("run-killed", "running")
    async with supervising(plan.settings(settings, "work finish"), redis) as api:
        await wait_until(plan.is_at_work)
        assert await api.store.current_run() == "run-killed"
        await api.supervisor.stop_run("run-killed")
        await when(api, "finished", "run-queued")


async def test_a_run_whose_directory_was_moved_away_fails_and_does_not_begin_anew(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    api = make_api(settings, redis, stopping=asyncio.Event())
    record = await submit(api, run_config)
    await api.store.write_progress("run-a", Progress(step=5, max_steps=8))
    async with supervising(plan.settings(settings, "finish"), redis) as api:
        failed = await when(api, "failed")
    assert failed.reason == f"its directory {record.run_dir} is not there any more: move it back, and resume the run"
    assert plan.pids() == []


async def test_a_rank_that_outlives_its_run_is_killed(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    brisk = plan.settings(settings, "linger finish").model_copy(update={"rank_stop_grace_s": 0.2})
    async with supervising(brisk, redis) as api:
        await submit(api, run_config, "run-a")
        await when(api, "finished", "run-a")
        await submit(api, run_config, "run-b")
        await when(api, "finished", "run-b")
        assert not is_alive(plan.pids()[0])


async def test_a_rank_that_is_stopped_for_long_is_killed_and_started_again(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopped_processes, "STOPPED_S", 0.5)
    async with supervising(plan.settings(settings, "work finish"), redis) as api:
        await submit(api, run_config)
        await wait_until(plan.is_at_work)
        os.kill(plan.pids()[0], signal.SIGSTOP)
        await when(api, "finished")
    assert len(plan.pids()) == 2
    assert not is_alive(plan.pids()[0])


async def test_a_run_that_vanished_from_redis_ends_its_rank_and_the_next_one_is_served(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    async with supervising(plan.settings(settings, "stubborn finish"), redis) as api:
        await submit(api, run_config, "run-a")
        await wait_until(plan.is_at_work)
        await api.store.delete("run-a")
        await submit(api, run_config, "run-b")
        await when(api, "finished", "run-b")
        assert not is_alive(plan.pids()[0])
        assert await api.store.get("run-a") is None


async def test_redis_killed_and_started_again_is_survived(
    settings: TrainerSettings, redis: Redis, redis_server: RedisServer, run_config: RunConfig, plan: RankPlan
) -> None:
    admin: Any = redis
    await admin.config_set("appendfsync", "always")  # else it confirms writes that are not in its file yet
    async with supervising(plan.settings(settings, "stubborn"), redis) as api:
        await submit(api, run_config)
        await wait_until(plan.is_at_work)
        redis_server.kill()
        redis_server.start()
        await api.supervisor.stop_run("run-a")
        assert (await when(api, "running")).desired == "stop"
        assert plan.is_at_work()
        assert len(plan.pids()) == 1


async def test_a_rank_may_be_pinned_to_cpus(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    cpu = max(os.sched_getaffinity(0))
    pinned = plan.settings(settings, "finish").model_copy(update={"rank_cpus": [cpu]})
    async with supervising(pinned, redis) as api:
        record = await submit(api, run_config)
        await when(api, "finished")
    assert f"start 1 on cpus [{cpu}]" in (Path(record.run_dir) / "rank.log").read_text()
