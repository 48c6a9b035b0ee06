"""What `headrace plan` computes of the sessions of a run with tools."""

from pathlib import Path
from typing import Any

import pytest

from headrace.plan.redis_memory import group_bytes
from headrace.plan.sessions import GROUPS_OF_A_REPLICA, recorded_bytes
from services.sessions.settings import SessionsSettings
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.headrace.plan.plan_rig import PACE, large_model, planned, value

pytestmark = pytest.mark.unit

WITH_TOOLS = ("--set", "tools=[my_tools:add]")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return large_model(tmp_path / "q8")


def test_a_run_with_tools_has_as_many_sessions_as_its_groups_have_rollouts(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = planned(capsys, "--model", model, *PACE, *WITH_TOOLS, "--prompt-tokens", 200)
    assert value(body, "sessions", "sessions") == 96 * 8
    assert value(body, "sessions", "replicas") == 2, "96 groups, of which a replica plays 64"
    one = recorded_bytes(num_generations=8, prompt_tokens=200, completion_tokens=1500)
    assert value(body, "sessions", "recordings, about") == 96 * one


def test_processors_need_a_number_of_turns_and_their_time(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = planned(capsys, "--model", model, *PACE, *WITH_TOOLS)
    assert "give --turns" in body["plan"]["sessions"]["turns"]["how"]
    body = planned(capsys, "--model", model, *PACE, *WITH_TOOLS, "--turns", 2.5)
    # 9000 tokens/s / 1500 tokens = 6 rollouts/s
    assert value(body, "sessions", "turns") == pytest.approx(15)
    assert "give --turn-cpu-s" in body["plan"]["sessions"]["processors"]["how"]
    body = planned(capsys, "--model", model, *PACE, *WITH_TOOLS, "--turns", 2.5, "--turn-cpu-s", 0.008)
    assert value(body, "sessions", "processors") == pytest.approx(0.12)


def test_a_run_without_tools_has_no_sessions(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "sessions" not in planned(capsys, "--model", model, *PACE)["plan"]


def test_a_replica_plays_as_many_groups_as_the_plan_says() -> None:
    assert SessionsSettings().max_inflight_groups == GROUPS_OF_A_REPLICA


@pytest.mark.parametrize(("generations", "tokens"), [(8, 250), (16, 2048)])
async def test_recordings_take_the_memory_in_redis_that_is_planned_for(
    redis: Redis, generations: int, tokens: int
) -> None:
    size = recorded_bytes(num_generations=generations, prompt_tokens=200, completion_tokens=tokens)
    key = RunKeys("run-test").sessions("00000000")
    for branch in range(generations):
        await redis.hset(key, f"{branch}/0", b"x" * (size // generations))
    used: Any = await redis.memory_usage(key, samples=0)
    assert size <= used <= 1.3 * size


@pytest.mark.parametrize("tokens", [250, 2048])
def test_the_recordings_of_a_group_are_not_larger_than_the_group(tokens: int) -> None:
    """So the plan of Redis, which counts every group in flight with its whole size, has room for them."""
    lengths = {"num_generations": 8, "prompt_tokens": 200, "completion_tokens": tokens}
    assert recorded_bytes(**lengths) <= 1.2 * group_bytes(**lengths, reward_funcs=["accuracy_reward"])
