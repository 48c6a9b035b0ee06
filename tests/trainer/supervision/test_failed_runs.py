"""A failed run goes on from its newest checkpoint when it is resumed."""

from pathlib import Path

import httpx
import pytest

from services.trainer.run_api.trainer_api import TrainerApi
from services.trainer.settings import TrainerSettings
from shared.redis.redis_connection import Redis
from shared.redis.run_record import Status
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.closed_directory import close_directory
from tests.small_disk import fill, free, small_disk
from tests.trainer.api_rig import serving, supervising, wait_until
from tests.trainer.rank_rig import RankPlan, is_alive


async def test_a_failed_run_is_resumed_and_one_that_failed_before_its_first_checkpoint_is_not(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan, tmp_path: Path
) -> None:
    async with supervising(plan.settings(settings, "exit=2 finish"), redis) as api, serving(api) as client:
        await api.store.create("run-a", run_config, run_dir=str(tmp_path / "run-a"))
        api.supervisor.wake()
        await wait_until(lambda: has_status(client, "failed"))

        refused = await client.post("/v1/runs/run-a/resume")
        assert (refused.status_code, refused.json()["type"]) == (409, "/problems/no-checkpoint")
        assert str(tmp_path / "run-a" / "checkpoints") in refused.json()["detail"]

        checkpoint_of(tmp_path / "run-a")
        resumed = await client.post("/v1/runs/run-a/resume")
        assert resumed.status_code == 202
        assert (resumed.json()["reason"], resumed.json()["ended_at_s"]) == ("", None)
        await wait_until(lambda: has_status(client, "finished"))
        assert (await client.post("/v1/runs/run-a/resume")).json()["type"] == "/problems/run-ended"
    assert len(plan.pids()) == 2


async def test_a_failed_run_that_is_resumed_before_its_rank_has_ended_is_started_again(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan, tmp_path: Path
) -> None:
    async with supervising(plan.settings(settings, "fail finish"), redis) as api, serving(api) as client:
        await api.store.create("run-a", run_config, run_dir=str(tmp_path / "run-a"))
        api.supervisor.wake()
        await wait_until(lambda: has_status(client, "failed"))
        await api.supervisor.resume_run("run-a")
        await wait_until(lambda: has_status(client, "finished"), timeout_s=60)
    assert len(plan.pids()) == 2


async def test_a_rank_that_outlives_its_failed_run_is_killed_although_the_run_was_resumed(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan, tmp_path: Path
) -> None:
    brisk = plan.settings(settings, "linger=failed finish").model_copy(update={"rank_stop_grace_s": 0.2})
    async with supervising(brisk, redis) as api, serving(api) as client:
        await api.store.create("run-a", run_config, run_dir=str(tmp_path / "run-a"))
        api.supervisor.wake()
        await wait_until(lambda: has_status(client, "failed"))
        await api.supervisor.resume_run("run-a")
        await wait_until(lambda: has_status(client, "finished"), timeout_s=60)
        assert not is_alive(plan.pids()[0])
    assert len(plan.pids()) == 2


async def test_a_resumed_run_that_is_stopped_in_the_queue_is_not_said_to_have_never_started(
    api: TrainerApi, run_config: RunConfig, tmp_path: Path
) -> None:
    await api.store.create("run-a", run_config, run_dir=str(tmp_path / "run-a"))
    for status in ("running", "failed"):
        await api.store.set_status("run-a", status)
    await api.supervisor.resume_run("run-a")
    await api.supervisor.stop_run("run-a")
    record = await api.store.get("run-a")
    assert record is not None
    assert (record.status, record.reason) == ("stopped", "stopped while it waited for its turn")


async def test_a_run_that_fails_before_its_first_checkpoint_does_not_keep_the_files_that_it_began_from(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan, tmp_path: Path
) -> None:
    held = [tmp_path / run_id / "beginning" for run_id in ("run-a", "run-b")]
    for directory in held:
        directory.mkdir(parents=True)
    checkpoint_of(tmp_path / "run-b")
    async with supervising(plan.settings(settings, "exit=2"), redis) as api, serving(api) as client:
        await api.store.create("run-b", run_config, run_dir=str(tmp_path / "run-b"))
        await api.store.create("run-a", run_config, run_dir=str(tmp_path / "run-a"))
        api.supervisor.wake()
        await wait_until(lambda: has_status(client, "failed"))
        await wait_until(lambda: not held[0].exists(), timeout_s=60)
    assert held[1].exists(), "it can be resumed, and all its checkpoints may turn out to be damaged"


async def test_files_that_a_run_began_from_are_removed_at_the_next_start_if_its_end_was_cut_short(
    settings: TrainerSettings,
    redis: Redis,
    run_config: RunConfig,
    plan: RankPlan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The service was killed after it had written the run's status. The runs that wait their turn need their files."""
    statuses: dict[str, Status | None] = {"run-a": "stopped", "run-b": "failed", "run-c": "queued", "run-gone": None}
    links = {run_id: settings.runs_dir / run_id / "beginning" for run_id in statuses}
    store = RunStore(redis)
    for run_id, status in statuses.items():
        links[run_id].mkdir(parents=True)
        if status is not None:
            await store.create(run_id, run_config, run_dir=str(settings.runs_dir / run_id))
            await store.set_status(run_id, status)
    await store.ask_to("run-c", "pause")
    (settings.runs_dir / "lost+found").mkdir()
    close_directory(monkeypatch, settings.runs_dir / "lost+found")
    async with supervising(plan.settings(settings, "finish"), redis):
        await wait_until(lambda: not (links["run-a"].exists() or links["run-b"].exists()))
    assert links["run-c"].exists()
    assert links["run-gone"].exists(), "another Redis may have its record"


async def test_a_run_whose_disk_is_full_before_its_rank_starts_waits_for_room(
    settings: TrainerSettings, redis: Redis, run_config: RunConfig, plan: RankPlan
) -> None:
    with small_disk(64) as disk:
        fill(disk)
        async with supervising(plan.settings(settings, "finish"), redis) as api, serving(api) as client:
            await api.store.create("run-a", run_config, run_dir=str(disk / "many" / "run-a"))
            api.supervisor.wake()
            await wait_until(lambda: "which is full" in api.supervisor.keeper.note("run-a"))
            assert await has_status(client, "running")
            free(disk)
            await wait_until(lambda: has_status(client, "finished"))


def checkpoint_of(run_dir: Path) -> None:
    """Make a directory that looks like a checkpoint of the run."""
    checkpoint = run_dir / "checkpoints" / "step_00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")


async def has_status(client: httpx.AsyncClient, status: str) -> bool:
    found: str = (await client.get("/v1/runs/run-a")).json()["status"]
    return found == status
