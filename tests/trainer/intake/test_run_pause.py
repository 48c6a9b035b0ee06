"""A run is paused, by its rewards or by a user, and goes on: with the real loop, Redis and checkpoints."""

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest

from services.trainer.loop.training_loop import TrainingLoop
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.redis_restarts import RestartWatch
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.trainer.incarnations import create, json_lines, small_config
from tests.trainer.intake.pause_rig import Grader, Watcher, assert_exact, training
from tests.trainer.played import RUN_ID

LONG: dict[str, Any] = {"max_steps": 100_000, "save_steps": 100_000}


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the trainer check and report more than once per second."""
    monkeypatch.setattr("services.trainer.intake.external_changes._EVERY_S", 0.05)
    monkeypatch.setattr("services.trainer.loop.reporting._EVERY_S", 0.1)


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> RunConfig:
    """Pause when all groups in a window of four have failed, which is as many as may be in flight."""
    return small_config(tmp_path, tiny_model, reward_failure_window=4)


@pytest.fixture
def watcher(redis: Redis) -> Watcher:
    return Watcher(redis)


class Flaky(Grader):
    """Fails for all but two completions of a group."""

    def __call__(self, label: str, branch: int) -> float | None:
        return float(branch % 2) if self.works or branch < 2 else None


async def test_failing_rewards_pause_the_run_with_the_reason_and_a_test_group_that_succeeds_lets_it_go_on(
    redis: Redis, config: RunConfig, watcher: Watcher, tmp_path: Path
) -> None:
    await create(redis, config, tmp_path)
    grader = Grader(works=False)
    async with training(redis, grader) as run:
        paused = await watcher.paused("rewards")
        assert paused.status == "paused"
        assert paused.pause is not None
        assert (paused.pause.reward_func, paused.pause.failed_ratio) == ("parity", 1.0)
        assert paused.pause.last_failure == "error"
        assert paused.reason == paused.pause.reason
        assert paused.reason == (
            "reward function parity failed for 100% of the completions of the last 4 groups, more than "
            "reward_failure_threshold=0.5; it last said: error"
        )
        at_first = (await watcher.reports(1)).progress
        await watcher.until(lambda it: sum(it.progress.groups_dropped.values()) >= at_first.groups_admitted + 3)
        now = await watcher.reports(1)
        assert now.progress.step == 0
        assert now.progress.waiting_for.startswith(
            "reward function parity to work again; one group every 0 s tests it. Fix it: "
        )
        assert now.progress.waiting_for.endswith(" unscorable (last failure: parity: error)")
        in_flight = now.progress.groups_admitted - sum(now.progress.groups_dropped.values())
        assert in_flight <= 1, "a test group at a time"
        grader.works = True
        ending, loop = await run
    assert ending == "finished"
    assert loop.ledger.num_trained == 12
    assert_exact(loop.ledger, run_dir=tmp_path / "run", failed=grader.failed)
    record = await watcher.record()
    assert (record.status, record.reason, record.pause) == ("running", "", None)
    told = await watcher.statuses()
    assert told == [
        {"status": "paused", "by": "rewards", "reason": paused.reason, "reward_func": "parity", "failed_ratio": 1.0},
        {"status": "running", "reason": "a test group was scored successfully"},
    ]


async def test_after_a_restart_of_redis_its_record_says_again_whether_the_run_is_paused(
    redis: Redis, config: RunConfig, watcher: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is set back to what it was before the pause, and then to what it was in the pause."""

    async def has_restarted(self: RestartWatch) -> bool:
        return True

    monkeypatch.setattr(RestartWatch, "has_restarted", has_restarted)
    await create(redis, config.model_copy(update=LONG), tmp_path)
    async with training(redis, Grader()) as run:
        await watcher.until(lambda it: it.progress.step > 0)
        await watcher.store.ask_to(RUN_ID, "pause")
        in_pause = await watcher.paused("user")
        await redis.hset(RunKeys(RUN_ID).run, mapping={"status": "running", "reason": ""})
        assert (await watcher.paused("user")).pause == in_pause.pause
        await watcher.store.ask_to(RUN_ID, "run")
        await watcher.until(lambda it: it.status == "running")
        await redis.hset(RunKeys(RUN_ID).run, mapping={"status": "paused", "reason": in_pause.reason})
        await watcher.until(lambda it: (it.status, it.reason) == ("running", ""))
        await watcher.store.ask_to(RUN_ID, "stop")
        await run


async def test_a_pause_is_in_no_step_time_and_in_paused_s(
    redis: Redis, config: RunConfig, watcher: Watcher, tmp_path: Path
) -> None:
    """Groups 0 to 3 are trained in the first two steps. From group 4 on, all fail, for at least two seconds."""
    await create(redis, config, tmp_path)

    class FailsLater(Grader):
        def __call__(self, label: str, branch: int) -> float | None:
            return float(branch % 2) if int(label) < 4 else super().__call__(label, branch)

    grader = FailsLater(works=False)
    async with training(redis, grader) as run:
        await watcher.until(lambda it: it.progress.paused_s > 2)
        grader.works = True
        await run
    lines = json_lines(tmp_path / "run" / "metrics.jsonl")
    paused_s = lines[-1]["paused_s"]
    assert paused_s > 2
    assert [line["paused_s"] for line in lines] == [0, 0, *[paused_s] * 4], "it was paused before the third step"
    assert lines[2]["step_time"] < lines[2]["at_s"] - lines[1]["at_s"] - paused_s / 2
    assert (await watcher.record()).progress.paused_s == paused_s


async def test_while_rewards_fail_for_some_completions_whole_batches_of_what_is_scored_are_trained_and_make_room(
    redis: Redis, config: RunConfig, watcher: Watcher, tmp_path: Path
) -> None:
    """Three of five completions fail and two are scored: no group is dropped, and the window could stay full."""
    await create(redis, config.model_copy(update={"num_generations": 5, **LONG}), tmp_path)
    grader = Flaky(works=False)
    async with training(redis, grader) as run:
        paused = await watcher.paused("rewards")
        assert paused.pause is not None
        assert paused.pause.failed_ratio == pytest.approx(0.6)
        probing = " tests it (last failure: error). Fix it: "
        before = (await watcher.until(lambda it: probing in it.progress.waiting_for)).progress
        await watcher.until(lambda it: it.progress.groups_admitted >= before.groups_admitted + 3)
        assert (await watcher.record()).status == "paused"
        grader.works = True
        await watcher.until(lambda it: it.status == "running")
        await watcher.store.ask_to(RUN_ID, "stop")
        ending, loop = await run
    assert ending == "stopped"
    assert_exact(loop.ledger, run_dir=tmp_path / "run", failed=set())
    assert loop.ledger.dropped_by_reason().keys() <= {"run_stopped"}


async def test_a_run_that_makes_its_last_step_while_its_rewards_pause_it_is_evaluated_all_the_same(
    redis: Redis, tmp_path: Path, tiny_model: Path, watcher: Watcher
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "b1="}\n{"prompt": "b2="}\n')
    config = small_config(
        tmp_path, tiny_model, reward_failure_window=4, num_generations=5, eval_dataset_name=str(held_out), eval_steps=6
    )
    await create(redis, config, tmp_path)
    async with training(redis, Flaky(works=False)) as run:
        ending, _ = await run
    assert ending == "finished"
    assert [line["step"] for line in json_lines(tmp_path / "run" / "evaluations.jsonl")] == [6]
    assert [told["status"] for told in await watcher.statuses()] == ["paused", "running"]


async def test_a_pause_that_was_asked_for_keeps_what_is_under_way_until_the_run_is_resumed(
    redis: Redis, config: RunConfig, watcher: Watcher, tmp_path: Path
) -> None:
    await create(redis, config.model_copy(update=LONG), tmp_path)
    keys, grader = RunKeys(RUN_ID), Grader()
    async with training(redis, grader) as run:
        await watcher.until(lambda it: it.progress.step >= 2)
        await watcher.store.ask_to(RUN_ID, "pause")
        paused = await watcher.paused("user")
        assert (paused.status, paused.reason) == ("paused", "a user asked for it")

        async def is_everything_scored() -> bool:
            return await redis.xlen(keys.prompts) == await redis.xlen(keys.completions) == 0

        await eventually(is_everything_scored)
        await watcher.reports(1)
        before = (await watcher.until(lambda it: it.progress.waiting_for == "a user to resume it")).progress
        assert before.groups_admitted - before.groups_trained >= 2, "a whole batch has arrived and waits"
        after = (await watcher.reports(2)).progress
        assert (after.step, after.groups_admitted) == (before.step, before.groups_admitted)
        assert after.paused_s > before.paused_s
        await watcher.store.ask_to(RUN_ID, "run")
        await watcher.until(lambda it: it.progress.step > before.step)
        assert (await watcher.record()).status == "running"
        await watcher.store.ask_to(RUN_ID, "stop")
        ending, loop = await run
    assert ending == "stopped"
    assert_exact(loop.ledger, run_dir=tmp_path / "run", failed=set())
    assert [told["status"] for told in await watcher.statuses()] == ["paused", "running"]


async def test_a_test_group_does_not_end_a_pause_that_was_asked_for(
    redis: Redis, config: RunConfig, watcher: Watcher, tmp_path: Path
) -> None:
    await create(redis, config, tmp_path)
    grader = Grader(works=False)
    async with training(redis, grader) as run:
        by_rewards = (await watcher.paused("rewards")).pause
        await watcher.store.ask_to(RUN_ID, "pause")
        by_user = (await watcher.paused("user")).pause
        assert by_rewards is not None
        assert by_user is not None
        assert by_user.paused_before_s == pytest.approx(by_user.since_s - by_rewards.since_s, abs=0.01)
        grader.works = True
        before = (await watcher.reports(1)).progress.groups_admitted
        after = await watcher.reports(2)
        assert (after.status, after.progress.groups_admitted) == ("paused", before)
        await watcher.store.ask_to(RUN_ID, "run")
        ending, loop = await run
    assert ending == "finished"
    assert_exact(loop.ledger, run_dir=tmp_path / "run", failed=grader.failed)


async def test_a_resumed_run_does_not_wait_for_a_test_group_and_pauses_again_if_rewards_still_fail(
    redis: Redis, config: RunConfig, watcher: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_test_groups(loop: TrainingLoop) -> None:
        monkeypatch.setattr(loop.intake.pace, "_next_test_group_at", math.inf)

    await create(redis, config, tmp_path)
    grader = Grader(works=False)
    async with training(redis, grader, meddle=no_test_groups) as run:
        first = (await watcher.paused("rewards")).pause
        assert first is not None
        await watcher.store.ask_to(RUN_ID, "run")
        again = await watcher.until(lambda it: it.pause is not None and it.pause.since_s > first.since_s)
        assert again.pause is not None
        assert again.pause.num_resumes == 1
        # Earlier failures do not count again after the rewards were repaired.
        await watcher.reports(1)
        await watcher.until(lambda it: it.progress.groups_admitted == sum(it.progress.groups_dropped.values()))
        grader.works = True
        await watcher.store.ask_to(RUN_ID, "run")
        ending, loop = await run
    assert ending == "finished"
    assert_exact(loop.ledger, run_dir=tmp_path / "run", failed=grader.failed)
    statuses = [(told["status"], told.get("by", told["reason"])) for told in await watcher.statuses()]
    assert statuses == [("paused", "rewards"), ("running", "a user resumed it")] * 2


@pytest.mark.parametrize("by", ["user", "rewards"])
async def test_a_trainer_that_is_started_again_finds_its_run_paused_and_counts_no_failed_group_twice(
    by: str, redis: Redis, config: RunConfig, watcher: Watcher, tmp_path: Path
) -> None:
    await create(redis, config, tmp_path)
    terminate, grader = asyncio.Event(), Grader(works=False)
    async with training(redis, grader, terminate=terminate) as first:
        before = await watcher.paused("rewards")
        if by == "user":
            await watcher.store.ask_to(RUN_ID, "pause")
            before = await watcher.paused("user")
        terminate.set()
        assert (await first)[0] == "terminated"
    assert (await watcher.record()).pause == before.pause
    started_again_at = time.time()
    async with training(redis, grader) as second:
        await watcher.until(lambda it: it.progress.updated_at_s > started_again_at and not it.progress.starting)
        found = await watcher.reports(2)
        assert found.pause == before.pause
        assert found.progress.paused_s > before.progress.paused_s
        grader.works = True
        if by == "user":
            await watcher.store.ask_to(RUN_ID, "run")
        ending, loop = await second
    assert ending == "finished"
    assert loop.ledger.num_trained == 12
    assert_exact(loop.ledger, run_dir=tmp_path / "run", failed=grader.failed)


async def test_a_run_that_was_resumed_while_its_trainer_was_away_goes_on_when_it_is_back(
    redis: Redis, config: RunConfig, watcher: Watcher, tmp_path: Path
) -> None:
    await create(redis, config, tmp_path)
    terminate, grader = asyncio.Event(), Grader(works=False)
    async with training(redis, grader, terminate=terminate) as first:
        await watcher.paused("rewards")
        terminate.set()
        await first
    grader.works = True
    await watcher.store.ask_to(RUN_ID, "run")
    async with training(redis, grader) as second:
        ending, loop = await second
    assert ending == "finished"
    assert_exact(loop.ledger, run_dir=tmp_path / "run", failed=grader.failed)
    assert [told["status"] for told in await watcher.statuses()] == ["paused", "running"]


async def test_a_run_that_was_asked_to_pause_before_it_began_admits_nothing(
    redis: Redis, config: RunConfig, watcher: Watcher, tmp_path: Path
) -> None:
    await create(redis, config, tmp_path)
    await watcher.store.ask_to(RUN_ID, "pause")
    async with training(redis, Grader()) as run:
        await watcher.paused("user")
        assert (await watcher.reports(2)).progress.groups_admitted == 0
        await watcher.store.ask_to(RUN_ID, "run")
        ending, loop = await run
    assert ending == "finished"
    assert_exact(loop.ledger, run_dir=tmp_path / "run", failed=set())


@pytest.mark.parametrize("by", ["user", "rewards"])
async def test_a_paused_run_can_be_stopped(
    by: str, redis: Redis, config: RunConfig, watcher: Watcher, tmp_path: Path
) -> None:
    await create(redis, config.model_copy(update=LONG), tmp_path)
    grader = Grader(works=by == "user")
    async with training(redis, grader) as run:
        if by == "user":
            await watcher.store.ask_to(RUN_ID, "pause")
        await watcher.paused(by)
        await watcher.store.ask_to(RUN_ID, "stop")
        ending, loop = await run
    assert ending == "stopped"
    ledger = loop.ledger
    assert ledger.num_in_flight == 0
    assert ledger.dropped_by_reason().keys() <= {"unscorable", "run_stopped"}


async def test_failed_test_groups_do_not_pile_up_on_their_stream_however_long_a_pause_lasts(
    redis: Redis, config: RunConfig, watcher: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.intake.intake._MAX_UNACKED_WHILE_PAUSED", 8)

    def hurry(loop: TrainingLoop) -> None:
        loop.intake.pace.test_group_every_s = 0.0

    await create(redis, config, tmp_path)
    grader, keys = Grader(works=False), RunKeys(RUN_ID)
    async with training(redis, grader, meddle=hurry) as run:

        async def have_left() -> bool:
            num_on_stream = await redis.xlen(keys.scored)
            return (await watcher.record()).progress.groups_dropped.get("unscorable", 0) - num_on_stream >= 20

        await eventually(have_left)
        assert (await watcher.record()).progress.step == 0
        grader.works = True
        ending, loop = await run
    assert ending == "finished"
    assert_exact(loop.ledger, run_dir=tmp_path / "run", failed=grader.failed)
