"""The rewarder as a process: real HTTP, signals, kill -9."""

import asyncio
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from shared.messages import decode_scored_group, encode
from shared.redis.keys import REFUSALS, REWARDERS, RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.refusals import decode_refusals
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.groups import completed_group
from tests.rewarder.conftest import ROOT, RewarderProcess, descendants, fork_servers, is_running, until, user, wait_for
from tests.stream_view import entries

StartRewarder = Callable[..., RewarderProcess]


def has_gone(pid: int) -> bool:
    return not is_running(pid)


def has_started(directory: Path) -> bool:
    return num_started(directory) > 0


def num_started(directory: Path) -> int:
    return len(list(directory.glob("started-*")))


async def a_run_that_waits(redis: Redis, config: RunConfig, directory: Path) -> RunKeys:
    """Make a run with one group whose reward waits for the file ``go``."""
    changed = config.model_copy(update={"reward_funcs": [user("waits_for_go")]})
    await RunStore(redis).create("run-test", changed, run_dir="unused")
    await RunStore(redis).set_status("run-test", "running")
    keys = RunKeys("run-test")
    group = completed_group("00000001")
    group = msgspec.structs.replace(
        group, prompt=msgspec.structs.replace(group.prompt, columns={"directory": str(directory)})
    )
    await redis.xadd(keys.completions, {"group_id": "00000001", "payload": encode(group)})
    return keys


async def test_a_group_whose_rewarder_was_killed_is_scored_exactly_once_after_a_restart(
    redis: Redis, run_config: RunConfig, start_rewarder: StartRewarder, tmp_path: Path
) -> None:
    keys = await a_run_that_waits(redis, run_config, tmp_path)
    first = start_rewarder()
    wait_for(lambda: has_started(tmp_path), what="the reward function to start", timeout_s=120)
    children = descendants(first.process.pid)
    first.kill()
    wait_for(lambda: not any(is_running(pid) for pid in children), what="the end of every process of the dead rewarder")
    assert len(children) >= 4, "fork server, resource tracker and two workers were expected"
    assert await redis.xlen(keys.scored) == 0
    assert (await redis.xpending(keys.completions, REWARDERS))["pending"] == 1
    (tmp_path / "go").touch()
    second = start_rewarder()

    async def is_scored() -> bool:
        return bool(await redis.xlen(keys.scored))

    await until(is_scored, what="the scored group")
    second.wait_until_ready()
    assert second.stop() == 0, second.log()
    assert num_started(tmp_path) == 2, "it began twice"
    published = await entries(redis, keys.scored)
    assert len(published) == 1, "it was published once"
    scored = decode_scored_group(published[0][1]["payload"])
    assert [rollout.rewards[0].value for rollout in scored.rollouts] == [1.0, 1.0]
    assert await redis.xlen(keys.completions) == 0
    assert await redis.xlen(keys.dead) == 0


async def test_sigterm_ends_it_with_exit_0_and_no_process_left_even_with_calls_that_never_end(
    redis: Redis, run_config: RunConfig, start_rewarder: StartRewarder, tmp_path: Path
) -> None:
    keys = await a_run_that_waits(redis, run_config, tmp_path)
    rewarder = start_rewarder(HEADRACE_DRAIN_S="0.5")
    rewarder.wait_until_ready()
    wait_for(lambda: has_started(tmp_path), what="the reward function to start")
    body = {"reward_funcs": [user("never_ends")], "prompts": ["p"], "completions": ["c"], "timeout_s": 0.1}
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
        reply = await client.post(
            rewarder.url("/v1/score"), json=body, headers={"Authorization": "Bearer key-of-the-test"}
        )
    assert reply.json()["outcomes"][0][0]["outcome"] == "timeout", reply.text
    children = descendants(rewarder.process.pid)
    started_at = time.monotonic()
    assert rewarder.stop() == 0, rewarder.log()
    assert time.monotonic() - started_at < 60
    wait_for(lambda: not any(is_running(pid) for pid in children), what="the end of its children")
    assert await redis.xlen(keys.completions) == 1, "the group waits for the next rewarder"


def test_a_thread_that_an_async_function_starts_does_not_keep_it_from_ending(start_rewarder: StartRewarder) -> None:
    rewarder = start_rewarder()
    rewarder.wait_until_ready()
    body = {"reward_funcs": [user("beside_a_thread")], "prompts": ["p"], "completions": ["c"]}
    key = {"Authorization": "Bearer key-of-the-test"}
    with httpx.Client(trust_env=False, timeout=120, headers=key) as client:
        reply = client.post(rewarder.url("/v1/score"), json=body)
    assert reply.json()["outcomes"][0][0]["outcome"] == "scored", reply.text
    assert rewarder.stop() == 0, rewarder.log()


async def test_an_async_function_that_blocks_costs_its_own_outcome_and_nothing_else(
    start_rewarder: StartRewarder, tmp_path: Path
) -> None:
    rewarder = start_rewarder()
    rewarder.wait_until_ready()
    columns = {"directory": [str(tmp_path)]}
    body = {"reward_funcs": [user("blocks_the_loop")], "prompts": ["p"], "completions": ["c"], "columns": columns}
    other = {"reward_funcs": ["trl_shaped_rewards:awaited"], "prompts": ["p"], "completions": ["c"]}
    key = {"Authorization": "Bearer key-of-the-test"}
    async with httpx.AsyncClient(base_url=rewarder.url(""), trust_env=False, timeout=60, headers=key) as client:
        blocking = asyncio.create_task(client.post("/v1/score", json={**body, "timeout_s": 3}))
        await eventually(lambda: has_started(tmp_path))
        assert (await client.get("/livez")).status_code == 200
        assert (await client.post("/v1/score", json=other)).json()["outcomes"][0][0]["outcome"] == "scored"
        (outcome,) = (await blocking).json()["outcomes"][0]
    assert outcome["outcome"] == "timeout"
    assert "a function that blocks should be a plain def" in outcome["detail"]
    assert rewarder.stop() == 0, rewarder.log()


def test_help_needs_nothing_heavy_and_no_settings(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update(fastapi=None, uvicorn=None, math_verify=None, redis=None, pydantic=None)\n"
        "from services.rewarder.__main__ import main\nmain(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "HEADRACE_REWARD_PATH" in done.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"HEADRACE_REWARD_PATH": "/no/such/place"}, "HEADRACE_REWARD_PATH: /no/such/place is not a directory"),
        ({"HEADRACE_NUM_REWARD_WORKERS": "0"}, "HEADRACE_NUM_REWARD_WORKERS: "),
        ({"HEADRACE_HOST": "0.0.0.0", "HEADRACE_API_KEY": ""}, "HEADRACE_API_KEY"),
    ],
)
def test_a_wrong_setting_is_a_sentence_and_exit_2(
    start_rewarder: StartRewarder, settings: dict[str, str], message: str
) -> None:
    rewarder = start_rewarder(**settings)
    assert rewarder.process.wait(timeout=120) == 2
    assert message in rewarder.log()
    assert "Traceback" not in rewarder.log()


def test_a_port_that_is_taken_is_a_sentence_and_exit_2(start_rewarder: StartRewarder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        rewarder = start_rewarder(HEADRACE_PORT=str(taken.getsockname()[1]), HEADRACE_LOG_LEVEL="CRITICAL")
        assert rewarder.process.wait(timeout=120) == 2
    assert "set HEADRACE_PORT to a free port" in rewarder.log()
    assert "Traceback" not in rewarder.log()


def test_a_metrics_port_that_is_taken_is_a_sentence_and_exit_2(start_rewarder: StartRewarder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        rewarder = start_rewarder(HEADRACE_METRICS_PORT=str(taken.getsockname()[1]))
        assert rewarder.process.wait(timeout=120) == 2
    assert "set HEADRACE_METRICS_PORT to a free port" in rewarder.log()
    assert "Traceback" not in rewarder.log()


async def test_why_it_cannot_start_is_left_where_people_look_until_it_does(
    redis: Redis, start_rewarder: StartRewarder
) -> None:
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        rewarder = start_rewarder()
        assert rewarder.process.wait(timeout=120) == 2
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")
    (refusal,) = decode_refusals(await redis.hgetall(REFUSALS))
    assert refusal.kind == "rewarder"
    assert refusal.reason.startswith("it ended, saying: Redis evicts keys when memory is short")
    start_rewarder().wait_until_ready()
    assert await redis.hgetall(REFUSALS) == {}


def test_without_redis_it_is_alive_but_not_ready_and_gives_up_with_exit_1(start_rewarder: StartRewarder) -> None:
    nowhere = "redis://127.0.0.1:9/0"
    rewarder = start_rewarder(HEADRACE_REDIS_URL=nowhere, HEADRACE_REDIS_PATIENCE_S="600")
    rewarder.wait_until_listening()
    with httpx.Client(trust_env=False, timeout=120) as client:
        assert client.get(rewarder.url("/livez")).status_code == 200
        reply = client.get(rewarder.url("/readyz"))
    assert (reply.status_code, reply.json()["detail"]) == (503, "starting: waiting for Redis")
    rewarder.kill()
    rewarder = start_rewarder(HEADRACE_REDIS_URL=nowhere, HEADRACE_REDIS_PATIENCE_S="3")
    assert rewarder.process.wait(timeout=120) == 1
    assert "Redis PING failed for 3 s" in rewarder.log()
    assert "Traceback" not in rewarder.log()


def test_a_rewarder_whose_fork_server_is_killed_while_it_starts_comes_up(start_rewarder: StartRewarder) -> None:
    rewarder = start_rewarder()
    for _ in range(3):
        wait_for(lambda: fork_servers(rewarder.process.pid), what="a fork server", timeout_s=120)
        (server,) = fork_servers(rewarder.process.pid)
        os.kill(server, signal.SIGKILL)
        wait_for(functools.partial(has_gone, server), what="its end")
    rewarder.wait_until_ready()
    assert rewarder.stop() == 0, rewarder.log()
    assert "the fork server ended meanwhile" in rewarder.log()
    assert "Traceback" not in rewarder.log()


def test_a_rewarder_that_can_start_no_worker_any_more_ends_and_says_why(
    start_rewarder: StartRewarder, tmp_path: Path
) -> None:
    # A socket's path has at most 107 bytes, which is too short for the names of tests.
    directory, is_ready = Path(tempfile.mkdtemp(prefix="headrace-")), tmp_path / "is-ready"
    impatient = (
        "import pathlib, sys, threading, time\n"
        "from services.rewarder import __main__\nfrom shared.user_code import worker_pool\n"
        "def hurry():\n"
        f"    while not pathlib.Path({str(is_ready)!r}).exists(): time.sleep(0.02)\n"
        "    worker_pool._GIVE_UP_AFTER_S = 2.0\n"
        "threading.Thread(target=hurry, daemon=True).start()\n"
        "sys.exit(__main__.main([]))"
    )
    rewarder = start_rewarder(command=(sys.executable, "-c", impatient), TMPDIR=str(directory))
    rewarder.wait_until_ready()
    is_ready.touch()  # on a busy machine the first worker needs longer than that
    (server,) = fork_servers(rewarder.process.pid)
    shutil.rmtree(directory)  # the path of the next fork server's socket
    os.kill(server, signal.SIGKILL)
    assert rewarder.process.wait(timeout=120) == 1
    (reason,) = (line for line in rewarder.log().splitlines() if '"CRITICAL"' in line)
    assert "no reward worker could be started for" in reason
