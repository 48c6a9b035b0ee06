"""From the completions stream to the scored stream, with a real Redis and real workers."""

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from redis.exceptions import AuthenticationError

from services.rewarder.group_call import call_for
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.run_follower import RunFollower
from services.rewarder.scoring import Scorer
from services.rewarder.trainer_state import TrainerState
from shared.beginning import Beginning
from shared.messages import encode
from shared.redis.keys import REWARDERS, RunKeys
from shared.redis.lease import alive
from shared.redis.redis_connection import Redis, connect
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.groups import completed_group
from tests.rewarder.conftest import until, user
from tests.rewarder.scoring_rig import add, make_run, scoring, wait_for_scored, with_columns
from tests.stream_view import entries


@pytest.mark.parametrize(("label", "run_id"), [("00000007", "run-test"), ("00000000", "run-other")])
async def test_a_group_that_its_entry_is_not_labelled_as_or_of_another_run_is_buried(
    label: str, run_id: str, redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics
) -> None:
    keys = await make_run(redis, run_config, reward_funcs=[user("exact")])
    group = completed_group("00000000")
    group = msgspec.structs.replace(group, prompt=msgspec.structs.replace(group.prompt, run_id=run_id))
    await redis.xadd(keys.completions, {"group_id": label, "payload": encode(group)})
    async with scoring(redis, scorer, metrics):

        async def is_buried() -> bool:
            return bool(await redis.xlen(keys.dead))

        await until(is_buried, what="the group to be buried")
    ((_, letter),) = await entries(redis, keys.dead)
    assert b"the entry is" in letter["reason"]
    assert await redis.xlen(keys.scored) == 0


def test_the_call_for_a_group_has_the_run_s_template_arguments() -> None:
    call = call_for(
        completed_group("00000001"),
        state=TrainerState(1, 2),
        max_completion_length=8,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert call.chat_template_kwargs == {"enable_thinking": False}
    assert (call.trainer_state, call.max_completion_length) == (TrainerState(1, 2), 8)
    assert len(call.prompts) == len(call.completions) > 1


def test_changes_to_a_function_s_arguments_reach_neither_the_group_nor_other_completions() -> None:
    group = completed_group("00000001")
    talk, facts = [{"role": "user", "content": "6*7?"}], {"units": ["m"]}
    prompt = msgspec.structs.replace(group.prompt, prompt=talk, columns={"facts": facts, "answer": "42"})
    call = call_for(msgspec.structs.replace(group, prompt=prompt), state=TrainerState(), max_completion_length=8)
    message = call.prompts[0][0]
    assert isinstance(message, dict)
    message["content"] = "changed"
    call.columns["facts"][0]["units"].append("s")
    call.columns["answer"][0] = "41"
    assert call.prompts[1] == talk == [{"role": "user", "content": "6*7?"}]
    assert call.columns["facts"][1] == facts == {"units": ["m"]}
    assert call.columns["answer"][1] == prompt.columns["answer"] == "42"


async def test_fifty_groups_with_a_slow_async_reward_take_little_longer_than_one(
    redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics
) -> None:
    keys = await make_run(redis, run_config, reward_funcs=[user("half_a_second")])
    await add(redis, keys, completed_group("warm-up"))
    async with scoring(redis, scorer, metrics):
        await wait_for_scored(redis, keys, 1)
        await add(redis, keys, *(completed_group(f"{number:08d}") for number in range(50)))
        started_at = time.monotonic()
        scored = await wait_for_scored(redis, keys, 51)
        seconds = time.monotonic() - started_at
    assert {group.prompt.group_id for group in scored[1:]} == {f"{number:08d}" for number in range(50)}
    assert seconds < 20.0, f"50 groups of 0.5 s each took {seconds:.2f} s"


async def test_no_more_groups_are_taken_from_the_stream_than_may_be_worked_on(
    redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics, tmp_path: Path
) -> None:
    keys = await make_run(redis, run_config, reward_funcs=[user("waits_for_go")])
    await add(redis, keys, *(with_columns(completed_group(f"{n}"), directory=str(tmp_path)) for n in range(40)))
    seen: list[int] = []

    async def pending() -> int:
        seen.append(int((await redis.xpending(keys.completions, REWARDERS))["pending"]))
        return seen[-1]

    async def five_are_taken() -> bool:
        return await pending() == 5

    async def all_are_scored() -> bool:
        await pending()
        return bool(await redis.xlen(keys.scored) == 40)

    async with scoring(redis, scorer, metrics, max_inflight_groups=5):
        await until(five_are_taken, what="five groups in hand")
        (tmp_path / "go").touch()
        await until(all_are_scored, what="all of them")
    assert max(seen) == 5


async def test_a_group_whose_reward_is_slow_holds_up_no_other(
    redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics, tmp_path: Path
) -> None:
    keys = await make_run(redis, run_config, reward_funcs=[user("waits_for_go")], reward_timeout_s=600)
    ready, slow = tmp_path / "ready", tmp_path / "slow"
    for directory in (ready, slow):
        directory.mkdir()
    (ready / "go").touch()
    await add(redis, keys, with_columns(completed_group("slow"), directory=str(slow)))
    async with scoring(redis, scorer, metrics):
        await add(redis, keys, *(with_columns(completed_group(f"{n}"), directory=str(ready)) for n in range(10)))
        await wait_for_scored(redis, keys, 10)
        (slow / "go").touch()
        scored = await wait_for_scored(redis, keys, 11)
    assert scored[-1].prompt.group_id == "slow", "the others waited for it"
    assert all(rollout.rewards[0].value == 1.0 for group in scored for rollout in group.rollouts)


async def test_a_group_whose_reward_hangs_is_not_lost(
    redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics, tmp_path: Path
) -> None:
    keys = await make_run(redis, run_config, reward_funcs=[user("waits_for_go")], reward_timeout_s=1)
    await add(redis, keys, with_columns(completed_group("hanging"), directory=str(tmp_path)))
    async with scoring(redis, scorer, metrics):
        (scored,) = await wait_for_scored(redis, keys, 1)
    assert [rollout.rewards[0].outcome for rollout in scored.rollouts] == ["timeout", "timeout"]


async def test_lost_rollouts_are_published_unscored_and_no_function_sees_them(
    redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics
) -> None:
    keys = await make_run(redis, run_config, reward_funcs=[user("exact")])
    whole = completed_group("00000000")
    lost = msgspec.structs.replace(whole.rollouts[0], lost="a tool hung")  # with the turns before the call
    nothing = tuple(msgspec.structs.replace(each, rows=(), lost="no tool") for each in completed_group("2").rollouts)
    groups = (
        msgspec.structs.replace(whole, rollouts=(lost, whole.rollouts[1])),
        msgspec.structs.replace(completed_group("2"), rollouts=nothing),
    )
    await add(redis, keys, *groups)
    async with scoring(redis, scorer, metrics):
        scored = await wait_for_scored(redis, keys, 2)
    found = {group.prompt.group_id: [rollout.rewards[0] for rollout in group.rollouts] for group in scored}
    outcomes = {name: [(one.outcome, one.value, one.detail) for one in of_group] for name, of_group in found.items()}
    assert outcomes == {
        "00000000": [("lost", None, "a tool hung"), ("scored", 1.0, "")],
        "2": [("lost", None, "no tool")] * 2,
    }


async def test_a_reward_that_vanished_after_submit_is_an_error_outcome_and_no_crash(
    redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics
) -> None:
    keys = await make_run(redis, run_config, reward_funcs=["vanished:f", user("one")])
    await add(redis, keys, completed_group("00000001"))
    async with scoring(redis, scorer, metrics):
        (scored,) = await wait_for_scored(redis, keys, 1)
    for rollout in scored.rollouts:
        assert [(reward.outcome, reward.value) for reward in rollout.rewards] == [("error", None), ("scored", 1.0)]
        assert rollout.rewards[0].detail.startswith("no module named vanished")


async def test_a_run_that_names_a_library_gets_an_error_outcome_and_nothing_is_called(
    redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    kwargs = {"os:system": {"command": f"touch {mark}"}}
    keys = await make_run(redis, run_config, reward_funcs=["os:system"], reward_kwargs=kwargs)
    await add(redis, keys, completed_group("00000001"))
    async with scoring(redis, scorer, metrics):
        (scored,) = await wait_for_scored(redis, keys, 1)
    details = {rollout.rewards[0].detail for rollout in scored.rollouts}
    assert all(detail.startswith("reward functions cannot come from os") for detail in details)
    assert not mark.exists()


async def test_stopping_lets_running_groups_finish_and_gives_the_lease_back(
    redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics, tmp_path: Path
) -> None:
    keys = await make_run(redis, run_config, reward_funcs=[user("waits_for_go")])
    await add(redis, keys, with_columns(completed_group("00000001"), directory=str(tmp_path)))

    async def has_started() -> bool:
        return await asyncio.to_thread(lambda: any(tmp_path.glob("started-*")))

    async with scoring(redis, scorer, metrics) as loop:
        await until(has_started, what="the reward function")
        assert await alive(redis, leases=keys.leases(REWARDERS)) == {"rewarder-0"}
        loop.stop()
        await add(redis, keys, with_columns(completed_group("00000002"), directory=str(tmp_path)))
        (tmp_path / "go").touch()
    scored = [fields["group_id"] for _, fields in await entries(redis, keys.scored)]
    assert b"00000001" in scored  # the second one may come first, because a read was in progress
    assert await alive(redis, leases=keys.leases(REWARDERS)) == set()
    assert await redis.xlen(keys.completions) + len(scored) == 2, "groups without scores are still in the stream"


async def test_an_ended_run_is_left_and_the_next_run_is_served(
    redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics
) -> None:
    store = RunStore(redis)
    first = await make_run(redis, run_config, reward_funcs=[user("one")])
    async with scoring(redis, scorer, metrics) as loop:
        await add(redis, first, completed_group("00000001"))
        await wait_for_scored(redis, first, 1)
        assert loop.names_in_use() == {user("one")}
        await store.set_status("run-test", "finished")

        async def is_left() -> bool:
            return await alive(redis, leases=first.leases(REWARDERS)) == set()

        await until(is_left, what="the lease to be given back")

        async def is_unused() -> bool:
            return not loop.names_in_use()

        await until(is_unused, what="the run to be forgotten")
        await store.delete("run-test")
        await store.create("run-two", run_config.model_copy(update={"reward_funcs": [user("one")]}), run_dir="unused")
        await store.set_status("run-two", "running")
        second = RunKeys("run-two")
        await add(redis, second, completed_group("00000001", run_id="run-two"))
        await wait_for_scored(redis, second, 1)


async def test_the_rewards_of_a_run_that_continues_another_one_see_its_steps_too(
    redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics
) -> None:
    store = RunStore(redis)
    config = run_config.model_copy(update={"reward_funcs": [user("step_as_reward")]})
    beginning = Beginning(source="checkpoint", directory="unused", said="unused", step=80, steps_before=80)
    await store.create("run-test", config, run_dir="unused", beginning=beginning)
    await store.set_status("run-test", "running")
    keys = RunKeys("run-test")
    await add(redis, keys, completed_group("00000001"))
    async with scoring(redis, scorer, metrics):
        (scored,) = await wait_for_scored(redis, keys, 1)
    assert [rollout.rewards[0].value for rollout in scored.rollouts] == [80.0] * len(scored.rollouts)


async def test_eighty_queued_runs_take_nothing_from_the_one_that_trains(
    redis: Redis, redis_url: str, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics
) -> None:
    store = RunStore(redis)
    keys = await make_run(redis, run_config, reward_funcs=[user("one")])
    queued = [f"run-queued-{number}" for number in range(80)]
    for name in queued:
        await store.create(name, run_config, run_dir="unused")
    client = connect(redis_url)
    num_before = (await redis.info("clients"))["connected_clients"]
    async with scoring(client, scorer, metrics):
        for number in range(10):
            await add(redis, keys, completed_group(f"{number:08d}"))
            await wait_for_scored(redis, keys, number + 1)
        num_clients = (await redis.info("clients"))["connected_clients"] - num_before
        leases = [await alive(redis, leases=RunKeys(name).leases(REWARDERS)) for name in queued]
    await client.aclose()
    assert leases == [set()] * 80
    assert num_clients <= 4, (
        "connections of the loop: one each for reading, handing off, renewing the lease and looking for runs"
    )


def test_nothing_is_kept_of_a_run_that_ended_because_redis_lost_it(metrics: RewarderMetrics) -> None:
    nothing: Any = None
    loop = RunFollower(
        nothing,
        nothing,
        replica_id="rewarder-0",
        max_inflight_groups=1,
        poll_every_s=1.0,
        drain_s=1.0,
        redis_patience_s=1.0,
        metrics=metrics,
    )
    loop._states["run-lost"] = TrainerState(1, 2)  # pyright: ignore[reportPrivateUsage]
    loop._configs["run-lost"] = RunConfig(model="m", dataset_name="d", reward_funcs=[user("one")])  # pyright: ignore[reportPrivateUsage]
    loop._forget_all_but([])  # pyright: ignore[reportPrivateUsage]
    assert loop.names_in_use() == set()
    assert loop._states == {}  # pyright: ignore[reportPrivateUsage]


async def lose_the_run_and_score_the_next(redis: Redis, first: RunKeys, run_config: RunConfig) -> None:
    await add(redis, first, completed_group("00000001"))
    await wait_for_scored(redis, first, 1)
    await score_the_next(redis, run_config)


async def score_the_next(redis: Redis, run_config: RunConfig) -> None:
    await redis.flushall()
    await redis.execute_command("FUNCTION", "FLUSH")  # type: ignore[no-untyped-call]
    second = await make_run(redis, run_config, reward_funcs=[user("one")])
    await add(redis, second, completed_group("00000002"))
    (scored,) = await wait_for_scored(redis, second, 1)
    assert scored.prompt.group_id == "00000002"


async def test_a_wiped_redis_does_not_end_the_rewarder_which_serves_the_next_run(
    redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics
) -> None:
    first = await make_run(redis, run_config, reward_funcs=[user("one")])
    async with scoring(redis, scorer, metrics):
        await lose_the_run_and_score_the_next(redis, first, run_config)


async def test_a_redis_that_was_replaced_and_learns_of_its_users_later_does_not_end_the_rewarder(
    redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await make_run(redis, run_config, reward_funcs=[user("one")])
    num_refused = 0
    info = cast("Any", redis).info

    async def refuse(*_: Any) -> None:
        raise AuthenticationError("invalid username-password pair or user is disabled.")

    async def refuse_at_first(*args: Any) -> Any:
        nonlocal num_refused
        num_refused += 1
        return await (refuse() if num_refused < 3 else info(*args))

    monkeypatch.setattr(redis, "ping", refuse)
    monkeypatch.setattr(redis, "info", refuse_at_first)

    async def is_let_in() -> bool:
        return num_refused >= 3

    async with scoring(redis, scorer, metrics):
        await redis.delete(first.completions)
        await until(is_let_in, what="the rewarder to ask until it is let in")
        await score_the_next(redis, run_config)
