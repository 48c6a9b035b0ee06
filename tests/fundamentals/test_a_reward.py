"""Chapter 3: a reward, from a user's Python function to an advantage.

A reward function gets the completions of a group and returns one number for each. It is the user's code, so it may
raise, hang or return nonsense. Synchronous functions therefore run in worker processes, and every call has a deadline.
A failed call is an outcome with a reason; it never becomes a zero. The rewarder reads completed groups from one stream
and publishes them with their rewards to the next. Anyone with a key can also ask for a score over HTTP.

The functions of these tests are in tests/rewarder/user_code/rewards_under_test.py. The code is in services/rewarder/.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.scoring import Scorer, WeightedFunction
from shared.redis.keys import REWARDERS
from shared.redis.redis_connection import Redis
from shared.redis.run_record import Progress
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.groups import completed_group, scored_group
from tests.rewarder.conftest import call_with, pool_and_scorer, shared_rewarder, until, user
from tests.rewarder.scoring_rig import add, make_run, outcomes_of, scoring, wait_for_scored
from tests.stream_view import entries
from tests.trainer.intake.batch_rig import Rig, failed

pytestmark = pytest.mark.unit


@pytest.fixture
def metrics() -> RewarderMetrics:
    return RewarderMetrics()


@pytest.fixture
async def scorer(metrics: RewarderMetrics) -> AsyncIterator[Scorer]:
    """Return a scorer with two worker processes."""
    async with pool_and_scorer(metrics) as (_, scorer):
        yield scorer


async def test_a_function_gets_the_arguments_that_trl_passes(scorer: Scorer) -> None:
    rows = await outcomes_of(scorer, user("everything"), call=call_with("a", "b", answer="42"))
    assert [(row[0].outcome, row[0].value, row[0].detail) for row in rows] == [("scored", 1.0, ""), ("scored", 2.0, "")]


async def test_sync_and_async_functions_score_the_same_group(scorer: Scorer) -> None:
    rows = await outcomes_of(scorer, user("exact"), user("step_as_reward"), call=call_with("42", "41", answer="42"))
    assert [[(o.name, o.outcome, o.value) for o in row] for row in rows] == [
        [(user("exact"), "scored", 1.0), (user("step_as_reward"), "scored", 3.0)],
        [(user("exact"), "scored", 0.0), (user("step_as_reward"), "scored", 3.0)],
    ]


async def test_each_outcome_has_the_weight_of_its_function(scorer: Scorer) -> None:
    functions = [WeightedFunction(user("one"), 0.25), WeightedFunction("think_format_reward", -2.0)]
    rows = await scorer.score(call_with("x"), functions, timeout_s=20, lane="test")
    assert [outcome.weight for outcome in rows[0]] == [0.25, -2.0]


async def test_a_value_that_is_not_a_finite_number_is_invalid_and_none_means_not_applicable(scorer: Scorer) -> None:
    rows = await outcomes_of(scorer, user("nonsense"), call=call_with(*"abcdef"))
    assert [(row[0].outcome, row[0].value) for row in rows] == [
        ("invalid", None),
        ("invalid", None),
        ("invalid", None),
        ("not_applicable", None),
        ("scored", 1.0),
        ("scored", 2.0),
    ]


@pytest.mark.parametrize("name", ["raises", "raises_async"])
async def test_a_function_that_raises_is_an_error_and_the_others_still_score(scorer: Scorer, name: str) -> None:
    rows = await outcomes_of(scorer, user(name), user("one"), call=call_with("a", "b"))
    for raised, neighbour in rows:
        assert (raised.outcome, raised.value) == ("error", None)
        assert raised.detail == r"ValueError: the judge is \ud800 ill"
        assert neighbour.value == 1.0


async def test_a_function_that_hangs_is_a_timeout_even_if_it_suppresses_its_cancellation(scorer: Scorer) -> None:
    await outcomes_of(scorer, user("step_as_reward"), call=call_with("a"))
    async with asyncio.timeout(120):
        rows = await outcomes_of(
            scorer, user("hangs_async"), user("step_as_reward"), call=call_with("a"), timeout_s=0.5
        )
    assert (rows[0][0].outcome, rows[0][0].value) == ("timeout", None)
    assert rows[0][1].value == 3.0


async def test_a_group_is_scored_published_and_acked(
    redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics
) -> None:
    names = [user("exact"), user("step_as_reward")]
    keys = await make_run(redis, run_config, reward_funcs=names, reward_weights=[1.0, 0.5])
    await RunStore(redis).write_progress("run-test", Progress(step=7, max_steps=9))
    await add(redis, keys, completed_group("00000001"))
    async with scoring(redis, scorer, metrics):
        (scored,) = await wait_for_scored(redis, keys, 1)
    assert scored.prompt.group_id == "00000001"
    for rollout in scored.rollouts:
        assert [(r.name, r.outcome, r.value, r.weight) for r in rollout.rewards] == [
            (names[0], "scored", 1.0, 1.0),
            (names[1], "scored", 7.0, 0.5),
        ]
    assert [(stamp.event, stamp.by) for stamp in scored.stamps] == [
        ("generated", "generator-0"),
        ("scored", "rewarder-0"),
    ]
    assert await redis.xlen(keys.completions) == 0
    assert (await redis.xpending(keys.completions, REWARDERS))["pending"] == 0


async def test_a_group_that_was_scored_already_is_not_published_again(
    redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics
) -> None:
    keys = await make_run(redis, run_config, reward_funcs=[user("one")])
    await add(redis, keys, completed_group("00000001"), completed_group("00000001"), completed_group("00000002"))
    async with scoring(redis, scorer, metrics):

        async def is_empty() -> bool:
            return bool(await redis.xlen(keys.completions) == 0)

        await until(is_empty, what="an empty completions stream")
        scored = await wait_for_scored(redis, keys, 2)
    assert sorted(group.prompt.group_id for group in scored) == ["00000001", "00000002"]


async def test_an_invalid_entry_is_buried_with_a_reason_and_the_next_one_is_scored(
    redis: Redis, run_config: RunConfig, scorer: Scorer, metrics: RewarderMetrics
) -> None:
    keys = await make_run(redis, run_config, reward_funcs=[user("one")])
    await redis.xadd(keys.completions, {"group_id": "00000001", "payload": b"\xc1 garbage"})
    torn = msgspec.structs.replace(completed_group("00000002"), rollouts=completed_group("00000002").rollouts[:1])
    await add(redis, keys, torn, completed_group("00000003"))
    async with scoring(redis, scorer, metrics):
        (scored,) = await wait_for_scored(redis, keys, 1)

        async def are_buried() -> bool:
            return bool(await redis.xlen(keys.dead) == 2)

        await until(are_buried, what="two dead letters")
    assert scored.prompt.group_id == "00000003"
    letters = {fields["group_id"]: fields["reason"] for _, fields in await entries(redis, keys.dead)}
    assert letters[b"00000001"].startswith(b"not a CompletedGroup")
    assert letters[b"00000002"] == b"group 00000002 has 1 rollouts instead of 2"
    assert await redis.xlen(keys.completions) == 0


@pytest.fixture
def client(redis_url: str, tmp_path: Path) -> Iterator[httpx.Client]:
    """Return an HTTP client of a rewarder that runs as a service."""
    headers = {"Authorization": "Bearer key-of-the-test"}
    with (
        shared_rewarder(redis_url, tmp_path / "rewarder.log") as shared,
        httpx.Client(base_url=shared.get().url(""), headers=headers, trust_env=False, timeout=120) as client,
    ):
        yield client


def test_a_failed_function_leaves_no_sum_in_the_answer_over_http(client: httpx.Client) -> None:
    body = {
        "prompts": ["p", "p"],
        "completions": ["42", "41"],
        "reward_funcs": [user("exact"), "think_format_reward", user("nonsense")],
        "reward_weights": [2.0, 0.5, 1.0],
        "columns": {"answer": ["42", "42"]},
    }
    reply = client.post("/v1/score", json=body)
    assert reply.status_code == 200, reply.text
    first, second = reply.json()["outcomes"]
    assert [(item["outcome"], item["value"], item["weight"]) for item in first] == [
        ("scored", 1.0, 2.0),
        ("scored", 0.0, 0.5),
        ("invalid", None, 1.0),
    ]
    assert [item["value"] for item in second] == [0.0, 0.0, None]
    assert reply.json()["rewards"] == [None, None], "a sum without the failed function would be another reward"


def test_the_trainer_computes_advantages_without_the_failed_completion(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1)
    rig.arrive(0, failed(scored_group(rewards=(0.0, 1.0, 1.0)), 2))
    (group,) = rig.trained()
    # The two scored rewards have mean 0.5 and std sqrt(0.5): -0.5/0.7072 and 0.5/0.7072.
    assert group.advantages_G.tolist() == pytest.approx([-0.70701, 0.70701, 0.0], abs=1e-4)
