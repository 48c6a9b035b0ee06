"""A run with an OpenEnv server in the sessions service as a process: allowed origins, rewards, kill -9, refusals."""

from pathlib import Path
from typing import Any

import pytest

from shared.redis.redis_connection import Redis
from shared.refusals import decode_refusals
from shared.run_options.run_config import RunConfig
from shared.turns import TurnRequest
from tests.eventually import eventually
from tests.sessions.fake_generators import HangsOnce, Reply, generator
from tests.sessions.replica import begin_run, completed, service
from tests.sessions.scripted import answer, assistant, call
from tests.sessions.tools.openenv_servers import SERVERS, openenv_server


@pytest.mark.slow
@pytest.mark.parametrize("program", SERVERS)
async def test_after_kill_9_another_replica_plays_the_recorded_steps_in_new_sessions(
    redis: Redis, redis_url: str, run_config: RunConfig, tmp_path: Path, program: list[str]
) -> None:
    def guess(request: TurnRequest, num_before: int) -> Reply:
        turn = assistant("", call("step", f'{{"number": {num_before}}}'))
        return answer(request, turn, token_ids=[10 * num_before + 1, 2])

    policy = HangsOnce(guess)

    with openenv_server(program, "game", max_sessions=2) as (url, _):
        keys = await begin_run(redis, run_config, asks="Begin.", environment_factory=url, reward_funcs=[])
        async with generator(redis, keys, policy):
            with service(redis_url, tmp_path, HEADRACE_REPLICA_ID="a", HEADRACE_ENVIRONMENT_ORIGINS=url) as first:
                await eventually(lambda: policy.hangs.is_set() or not first.is_alive())
                assert first.is_alive(), first.log()
            with service(redis_url, tmp_path, HEADRACE_REPLICA_ID="b", HEADRACE_ENVIRONMENT_ORIGINS=url) as second:
                group = await completed(redis, keys, process=second)
                assert second.end() == 0, second.log()
    secrets: set[int] = set()
    for rollout in group.rollouts:
        assert rollout.lost == ""
        played = rollout.environment
        assert played is not None
        secret, rewards = played.attributes["secret"], [0.5, 0.25, 0.0]
        guesses = 3 if secret > 2 else secret + 1
        assert rollout.rows[0].sampled_ids().tolist() == [1, 2, 11, 2, 21, 2][: 2 * guesses]
        assert len(rollout.completion) == 2 * guesses
        assert played.reward == (0.0 if secret > 2 else 1.0)
        assert played.attributes["rewards"] == [*rewards[: guesses - 1], played.reward]
        secrets.add(secret)
    assert len(secrets) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "settings", "says"),
    [
        (
            "http://127.0.0.1:9",
            {},
            "OpenEnv servers at http://127.0.0.1:9 are not allowed; an operator allows them with",
        ),
        ("http://me:key@127.0.0.1:9", {}, "environment_factory: the URL is not of the form"),
        (
            "http://127.0.0.1:9/envs",
            {"HEADRACE_ENVIRONMENT_ORIGINS": "http://127.0.0.1:9"},
            "the OpenEnv server http://127.0.0.1:9/envs cannot be used: ConnectError",
        ),
    ],
)
async def test_a_run_whose_server_cannot_be_used_is_refused_and_says_why(
    redis: Redis, redis_url: str, run_config: RunConfig, tmp_path: Path, url: str, settings: dict[str, str], says: str
) -> None:
    keys = await begin_run(redis, run_config, asks="Begin.", environment_factory=url, reward_funcs=[])
    with service(redis_url, tmp_path, **settings) as process:

        async def is_refused() -> Any:
            assert process.is_alive(), process.log()
            return await redis.hgetall(keys.refusals)

        await eventually(is_refused)
        assert process.end() == 0
    (refusal,) = decode_refusals(await redis.hgetall(keys.refusals))
    assert says in refusal.reason
