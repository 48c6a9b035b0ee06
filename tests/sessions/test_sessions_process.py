"""The sessions service as a process: real HTTP to generators, real tool workers, signals, kill -9."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shared.messages import encode
from shared.redis.keys import REFUSALS, RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.refusals import decode_refusals
from shared.run_options.run_config import RunConfig
from shared.turns import TurnRequest
from tests.eventually import eventually
from tests.groups import prompt_group
from tests.sessions.fake_generators import Reply, generator
from tests.sessions.replica import begin_run, completed, service
from tests.sessions.scripted import answer, assistant, call

TOOLS = '''
import os, pathlib, signal, time

HERE = pathlib.Path(__file__).parent

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    with (HERE / "added").open("a") as file:
        file.write("x")
    return a + b

def wait() -> str:
    """Wait for the file go."""
    with (HERE / "waiting").open("a") as file:
        file.write("x")
    while not (HERE / "go").exists():
        time.sleep(0.02)
    return "gone"

def die() -> None:
    """End the worker."""
    os.kill(os.getpid(), signal.SIGKILL)

def hang() -> None:
    """Never end."""
    while True:
        pass
'''


def count(directory: Path, name: str) -> int:
    path = directory / name
    return len(path.read_text()) if path.exists() else 0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "my_tools.py").write_text(TOOLS)
    return tmp_path


@pytest.mark.slow
async def test_after_kill_9_another_replica_goes_on_and_samples_no_recorded_turn_again(
    redis: Redis, redis_url: str, run_config: RunConfig, directory: Path
) -> None:
    keys = await begin_run(redis, run_config, tools=["my_tools:add", "my_tools:wait"])
    says = [assistant("", call("add", '{"a": 2, "b": 2}')), assistant("", call("wait", "{}")), assistant("4")]
    hangs = asyncio.Event()
    num_second_turns = 0

    async def policy(request: TurnRequest) -> Reply:
        nonlocal num_second_turns
        num_before = [message["role"] for message in request.messages].count("assistant")
        num_second_turns += num_before == 1
        if num_second_turns == 2 and not hangs.is_set():
            hangs.set()
            await asyncio.sleep(600)
        return answer(request, says[num_before], token_ids=[10 * num_before + 1, 2])

    async with generator(redis, keys, policy) as fake:
        with service(redis_url, directory, HEADRACE_REPLICA_ID="a") as first:
            # One rollout is in a tool call, the other one in a turn.
            await eventually(lambda: (hangs.is_set() and count(directory, "waiting") == 1) or not first.is_alive())
            assert first.is_alive(), first.log()
        (directory / "go").touch()
        with service(redis_url, directory, HEADRACE_REPLICA_ID="b") as second:
            group = await completed(redis, keys, process=second)
            assert second.end() == 0, second.log()
    assert [stamp.by for stamp in group.stamps] == ["b", "b"]
    for rollout in group.rollouts:
        assert isinstance(rollout.completion, list)
        assert [message["content"] for message in rollout.completion] == ["", "4", "", "gone", "4"]
        assert rollout.rows[0].sampled_ids().tolist() == [1, 2, 11, 2, 21, 2]
    # Three turns for each rollout, and the turn that hung a second time. A call whose result was recorded is not made
    # again, and the one under way is.
    assert sum(request.n for request in fake.requests) == 7
    assert (count(directory, "added"), count(directory, "waiting")) == (2, 3)
    assert await redis.xlen(keys.prompts) == 0
    assert await redis.keys("*:sessions:*") == []


@pytest.mark.slow
async def test_a_tool_that_ends_its_worker_and_one_that_hangs_lose_their_rollouts_and_nothing_else(
    redis: Redis, redis_url: str, run_config: RunConfig, directory: Path
) -> None:
    keys = await begin_run(redis, run_config, tools=["my_tools:die", "my_tools:hang"], tool_timeout_s=5.0)
    names = ["die", "hang"]

    def policy(request: TurnRequest) -> Reply:
        return answer(request, assistant("", call(names.pop(), "{}")))

    async with generator(redis, keys, policy) as fake:
        with service(redis_url, directory) as process:
            group = await completed(redis, keys, process=process)
            assert process.end() == 0
    killed, hung = sorted(group.rollouts, key=lambda rollout: rollout.lost)
    assert killed.lost.startswith("tool die: its worker process died twice"), killed.lost
    assert hung.lost.startswith("tool hang: "), hung.lost
    assert "5 s" in hung.lost
    assert sum(request.n for request in fake.requests) == 2


async def test_a_run_whose_tool_is_missing_is_refused_and_a_plain_run_is_left_alone(
    redis: Redis, redis_url: str, run_config: RunConfig, directory: Path
) -> None:
    keys = await begin_run(redis, run_config, tools=["my_tools:add", "my_tools:subtract"])
    plain = RunKeys("run-plain")
    await RunStore(redis).create("run-plain", run_config, run_dir="unused")
    await RunStore(redis).set_status("run-plain", "running")
    await redis.xadd(plain.prompts, {"group_id": "00000000", "payload": encode(prompt_group(run_id="run-plain"))})
    await redis.set(plain.required_version, "1:3")
    with service(redis_url, directory) as process:

        async def is_refused() -> Any:
            assert process.is_alive(), process.log()
            return await redis.hgetall(keys.refusals)

        await eventually(is_refused)
        async with process.client() as client:
            assert (await client.get("/readyz")).json() == {"status": "ready"}
            assert (await client.get("/v1/about")).json()["service"] == "sessions"
        assert process.end() == 0
    (refusal,) = decode_refusals(await redis.hgetall(keys.refusals))
    assert (refusal.kind, refusal.replica_id) == ("sessions", "sessions-of-the-test")
    assert "subtract" in refusal.reason
    assert await redis.hgetall(plain.refusals) == {}
    assert (await redis.xpending(plain.prompts, "generators"))["pending"] == 0
    assert await redis.hgetall(REFUSALS) == {}
