"""A run that uses an endpoint and Python functions: from the completions stream to the scored stream."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest

from services.rewarder.endpoints.endpoint_source import Endpoints
from services.rewarder.endpoints.registry import Registry
from services.rewarder.python_functions.loop_functions import LoopFunctions
from services.rewarder.python_functions.python_functions import PythonFunctions
from services.rewarder.python_functions.reward_tasks import RewardPool
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.run_follower import RunFollower
from services.rewarder.scoring import Scorer, WeightedFunction
from shared.errors import UnavailableError
from shared.messages import RewardOutcome, ScoredGroup
from shared.redis.redis_connection import Redis, connect
from shared.run_options.run_config import RunConfig
from tests.conftest import RedisServer
from tests.eventually import eventually
from tests.groups import completed_group
from tests.kept_ports import kept_port
from tests.rewarder.conftest import LIMITS, TASKS, call_with, user
from tests.rewarder.endpoints.conftest import ask, endpoints_on, register
from tests.rewarder.endpoints.misbehaving_server import MisbehavingServer, Received, answers
from tests.rewarder.scoring_rig import add, make_run, scoring, wait_for_scored


@contextlib.asynccontextmanager
async def scorer_with(endpoints: Endpoints, metrics: RewarderMetrics) -> AsyncGenerator[Scorer]:
    """Start a worker and a scorer that also knows endpoints."""
    loop_functions = LoopFunctions(places=TASKS.places, import_timeout_s=120.0)
    async with RewardPool(
        TASKS, num_workers=1, limits=LIMITS, queue_timeout_s=120.0, import_timeout_s=120.0, metrics=metrics
    ) as pool:
        functions = PythonFunctions(pool, loop_functions=loop_functions, import_timeout_s=120.0, check_timeout_s=120.0)
        yield Scorer(functions, metrics=metrics, sources=[endpoints])
        await functions.close()
        await eventually(loop_functions.close)


def rewards_of(group: ScoredGroup) -> list[list[RewardOutcome]]:
    return [list(rollout.rewards) for rollout in group.rollouts]


async def test_a_run_mixes_endpoints_with_functions_and_a_deleted_one_is_an_error(
    redis: Redis, run_config: RunConfig, endpoints: Endpoints, metrics: RewarderMetrics, server: MisbehavingServer
) -> None:
    items = [{"score": 0.5, "components": {"style": 1.0}, "detail": "fine"}, {"status": "overload"}]
    url = server.on("/judge", answers({"items": items}))
    spec = await register(endpoints, "judge", url, wire_format="headrace")
    keys = await make_run(redis, run_config, reward_funcs=["judge", user("one")], reward_weights=[2.0, 1.0])
    await add(redis, keys, completed_group("00000001", policy_version=3))
    async with scorer_with(endpoints, metrics) as scorer, scoring(redis, scorer, metrics) as loop:
        assert isinstance(loop, RunFollower)
        (scored,) = await wait_for_scored(redis, keys, 1)
        (judged, one), (failed, _) = rewards_of(scored)
        assert (judged.outcome, judged.value, judged.weight, judged.detail) == ("scored", 0.5, 2.0, "fine")
        assert (judged.components, judged.version) == ({"style": 1.0}, spec.version)
        assert judged.latency_s > 0
        assert (one.outcome, one.value) == ("scored", 1.0)
        assert (failed.outcome, failed.value) == ("overload", None)
        sent = cast("dict[str, Any]", server.received[0].json())
        assert (sent["run_id"], sent["group_id"], sent["policy_version"]) == ("run-test", "00000001", 3)
        assert sent["items"][0]["completion_ids"] == [8, 9]
        assert sent["items"][0]["columns"] == {"answer": "42"}

        await endpoints.registry.delete("judge")
        await add(redis, keys, completed_group("00000002"))
        deleted = (await wait_for_scored(redis, keys, 2))[1]
        for judged, one in rewards_of(deleted):
            assert (judged.outcome, judged.value) == ("error", None)
            assert judged.detail == "endpoint judge: it was deleted; register it again with POST /v1/rewards"
            assert one.value == 1.0


async def test_an_endpoint_that_hangs_holds_up_neither_functions_nor_other_groups(
    redis: Redis, run_config: RunConfig, endpoints: Endpoints, metrics: RewarderMetrics, server: MisbehavingServer
) -> None:
    may_answer = asyncio.Event()

    async def waits(request: Received, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        await answers([1.0, 0.0])(request, writer)

    await register(endpoints, "judge", server.on("/judge", waits, answers([1.0, 0.0])), timeout_s=600)
    keys = await make_run(redis, run_config, reward_funcs=["judge", user("one")], reward_timeout_s=600)
    await add(redis, keys, completed_group("waiting"))
    async with scorer_with(endpoints, metrics) as scorer, scoring(redis, scorer, metrics):
        await eventually(lambda: server.received)
        await add(redis, keys, *(completed_group(f"{number}") for number in range(10)))
        scored = await wait_for_scored(redis, keys, 10, timeout_s=60)
        assert "waiting" not in [group.prompt.group_id for group in scored]
        may_answer.set()
        scored = await wait_for_scored(redis, keys, 11)
    assert all(rewards_of(group)[0][0].value == 1.0 for group in scored)


async def test_as_many_requests_as_allowed_are_under_way_at_the_same_time(
    redis: Redis, metrics: RewarderMetrics, endpoints: Endpoints, server: MisbehavingServer
) -> None:
    all_are_here = asyncio.Event()

    async def answers_when_all_are_here(request: Received, writer: asyncio.StreamWriter) -> None:
        if len(server.received) == 200:
            all_are_here.set()
        await all_are_here.wait()
        await answers([1.0])(request, writer)

    url = server.on("/judge", answers_when_all_are_here)
    await register(endpoints, "judge", url, max_concurrency=200, batch_size=1)
    async with scorer_with(endpoints, metrics) as scorer:
        rows = await scorer.score(call_with(*"x" * 200), [WeightedFunction("judge")], timeout_s=60, lane="run-a")
    assert [row[0].value for row in rows] == [1.0] * 200
    assert len({request.headers["idempotency-key"] for request in server.received}) == 200


async def test_without_redis_what_was_registered_still_holds(
    metrics: RewarderMetrics, server: MisbehavingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = RedisServer(tmp_path)
    own.start()
    client = connect(own.url)
    try:
        async with endpoints_on(client, metrics=metrics) as endpoints:
            await register(endpoints, "judge", server.on("/judge", answers([1.0])))
            own.kill()
            monkeypatch.setattr("services.rewarder.endpoints.registry.REREAD_AFTER_S", 0.0)
            assert await endpoints.knows("judge")
            assert (await ask(endpoints, "judge", call_with("a")))[0].value == 1.0
    finally:
        await client.aclose()
        own.kill()


async def test_a_rewarder_that_never_could_read_the_registry_says_so(metrics: RewarderMetrics) -> None:
    client = connect(f"redis://127.0.0.1:{kept_port()}/0")
    try:
        with pytest.raises(UnavailableError, match="could not be read: Redis does not answer"):
            await Registry(client).registered()
        async with endpoints_on(client, metrics=metrics) as endpoints:
            assert not await endpoints.knows("accuracy_reward")
            assert not await endpoints.knows("my_rewards:judge")
            assert await endpoints.knows("judge"), "otherwise the error would be that it is not a built-in reward"
            with pytest.raises(RewardFailure, match="Redis does not answer") as failure:
                await ask(endpoints, "judge", call_with("a"))
            assert failure.value.outcome == "error"
    finally:
        await client.aclose()


async def test_an_unreadable_record_is_reported_as_such(
    redis: Redis, endpoints: Endpoints, metrics: RewarderMetrics
) -> None:
    for name, data in (("newer", b'{"url": "https://judge.example/", "colour": 1}'), ("torn", b"\xff{")):
        await redis.hset("headrace:reward_endpoints", name, data)
        assert await endpoints.registry.delete("nothing") is False  # which reads the registry again
        assert await endpoints.knows(name)
        with pytest.raises(RewardFailure, match="registered by another release, and this release cannot read it"):
            await ask(endpoints, name, call_with("a"))
