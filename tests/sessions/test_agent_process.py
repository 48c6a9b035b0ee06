"""Agent programs in the sessions service as a process: real workers, OpenAI's client, fake generators, kill -9."""

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from fastapi import FastAPI, Request, Response

from services.sessions.agents.agent_programs import agent_http_client
from shared.messages import CompletedGroup, PlayedEnvironment
from shared.redis.redis_connection import Redis, connect
from shared.redis.redis_readiness import wait_until_ready
from shared.run_options.run_config import RunConfig
from shared.turns import TurnRequest
from tests.conftest import RedisServer
from tests.eventually import eventually
from tests.sessions.fake_generators import Reply, generator
from tests.sessions.replica import begin_run, completed, service, why_refused
from tests.sessions.scripted import answer, assistant, user
from tests.sessions.served import served

openai = pytest.importorskip("openai")

PROGRAM = """
import asyncio, os, pathlib

import httpx
from openai import AsyncOpenAI

HERE = pathlib.Path(__file__).parent


def note(name):
    with (HERE / name).open("a") as file:
        file.write("x")


async def asks_twice(base_url, api_key, prompt, answer):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = list(prompt)
    for _ in range(2):
        answered = await client.chat.completions.create(model="any", messages=messages, temperature=0.3)
        said = answered.choices[0].message
        messages += [said, {"role": "user", "content": f"Are you sure? It is {answer}."}]
    return {"reward": 0.75}


async def rewrites(base_url, api_key, prompt, **row):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    first = await client.chat.completions.create(model="any", messages=prompt)
    summary = {"role": "assistant", "content": "In short: " + first.choices[0].message.content[:1]}
    await client.chat.completions.create(model="any", messages=[*prompt, summary, {"role": "user", "content": "And?"}])


async def hangs(base_url, api_key, prompt, **row):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    await client.chat.completions.create(model="any", messages=prompt)
    while True:
        pass


def fails(base_url, api_key, prompt, **row):
    raise RuntimeError("the sandbox is full")


def says_nothing(base_url, api_key, **row):
    return 1.0


async def waits_between_turns(base_url, api_key, prompt, **row):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    first = (await client.chat.completions.create(model="any", messages=prompt)).choices[0].message
    note("waiting")
    while not (HERE / "go").exists():
        await asyncio.sleep(0.02)
    await client.chat.completions.create(model="any", messages=[*prompt, first, {"role": "user", "content": "And?"}])


async def ends_by_itself(base_url, api_key, prompt, **row):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    await client.chat.completions.create(model="any", messages=prompt)
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as http:
        (await http.post(f"{base_url}/reward", json={"reward": 0.5})).raise_for_status()
        (await http.post(f"{base_url}/end")).raise_for_status()
    await asyncio.sleep(3600)


async def overflows(base_url, api_key, prompt, **row):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = list(prompt)
    while True:
        said = (await client.chat.completions.create(model="any", messages=messages)).choices[0].message
        messages += [said, {"role": "user", "content": "And?"}]
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "my_agent.py").write_text(PROGRAM)
    return tmp_path


ROW: dict[str, object] = {"answer": "4", "level": 1}


def rewards(group: CompletedGroup) -> list[float | None]:
    played_in = [rollout.environment for rollout in group.rollouts]
    return [environment.reward for environment in played_in if environment is not None]


def num_before(request: TurnRequest) -> int:
    return [message["role"] for message in request.messages].count("assistant")


def counts(request: TurnRequest) -> Reply:
    """Answer with the number of the turn, from 1."""
    number = num_before(request) + 1
    return answer(request, assistant(str(number)), token_ids=[10 * number + 1, 2])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def played(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompletedGroup]:
    """Return the group of a run with each program. One replica plays them, one after the other."""
    directory = tmp_path_factory.mktemp("agents")
    (directory / "my_agent.py").write_text(PROGRAM)
    config = RunConfig(model="unused", dataset_name="unused", reward_funcs=["unused"], num_generations=2)
    groups: dict[str, CompletedGroup] = {}
    async with connect(redis_server.url) as redis:
        await redis.flushall()
        await wait_until_ready(redis, timeout_s=120)
        with service(redis_server.url, directory) as process:
            for name in ("asks_twice", "rewrites", "hangs", "fails", "says_nothing", "ends_by_itself"):
                timeout_s, agent = 2.0 if name == "hangs" else 120.0, f"my_agent:{name}"
                keys = await begin_run(
                    redis, config, run_id=f"run-{name}", columns=ROW, agent=agent, agent_timeout_s=timeout_s
                )
                async with generator(redis, keys, counts):
                    groups[name] = await completed(redis, keys, process=process)
            assert process.end() == 0, process.log()
        assert await redis.keys("*:sessions:*") == []
    return groups


@pytest.mark.slow
def test_a_program_plays_rollouts_with_openais_client_and_its_return_value_is_the_reward(
    played: dict[str, CompletedGroup],
) -> None:
    for rollout in played["asks_twice"].rollouts:
        assert rollout.lost == ""
        (row,) = rollout.rows
        assert row.sampled_ids().tolist() == [11, 2, 21, 2]
        assert [turn.role for turn in row.turns] == ["assistant", "user", "assistant"]
        assert rollout.completion == [assistant("1"), user("Are you sure? It is 4."), assistant("2")]
        assert rollout.environment == PlayedEnvironment("my_agent:asks_twice", has_reward=True, reward=0.75)


@pytest.mark.slow
def test_a_program_that_rewrites_its_history_gives_two_rows(played: dict[str, CompletedGroup]) -> None:
    for rollout in played["rewrites"].rollouts:
        assert [row.sampled_ids().tolist() for row in rollout.rows] == [[11, 2], [21, 2]]
        assert rollout.completion == [assistant("In short: 1"), user("And?"), assistant("2")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hangs", "my_agent:hangs neither ended nor asked for a new turn for 2 s"),
        ("fails", "my_agent:fails ended with RuntimeError: the sandbox is full"),
        ("says_nothing", "my_agent:says_nothing ended without a turn"),
    ],
)
def test_the_rollout_of_a_program_that_hangs_fails_or_asks_for_nothing_is_lost(
    played: dict[str, CompletedGroup], name: str, reason: str
) -> None:
    assert [rollout.lost for rollout in played[name].rollouts] == [reason, reason]
    assert rewards(played[name]) == [None, None]


@pytest.mark.slow
def test_a_program_may_end_its_session_before_it_ends(played: dict[str, CompletedGroup]) -> None:
    assert [rollout.lost for rollout in played["ends_by_itself"].rollouts] == ["", ""]
    assert rewards(played["ends_by_itself"]) == [0.5, 0.5]


@pytest.mark.slow
async def test_a_program_that_fails_because_the_conversation_is_too_long_ends_its_rollout_there(
    redis: Redis, redis_url: str, run_config: RunConfig, directory: Path
) -> None:
    keys = await begin_run(redis, run_config, columns=ROW, agent="my_agent:overflows", max_completion_length=8)

    def policy(request: TurnRequest) -> Reply:
        return counts(request) if num_before(request) < 2 else (422, "context_length")

    async with generator(redis, keys, policy) as fake:
        with service(redis_url, directory) as process:
            group = await completed(redis, keys, process=process)
    assert [rollout.lost for rollout in group.rollouts] == ["", ""]
    assert [len(rollout.completion) for rollout in group.rollouts] == [3, 3]
    # A row may have 8 tokens after its prompt, which the fake generator renders as 3 or 4 tokens.
    (first, *_), *later = sorted((request.max_row_tokens, num_before(request)) for request in fake.requests)
    assert first == 0
    assert {limit for limit, _ in later} - {0} in ({11}, {12})


@pytest.mark.slow
async def test_after_kill_9_another_replica_starts_the_program_again_and_no_recorded_turn_is_sampled_again(
    redis: Redis, redis_url: str, run_config: RunConfig, directory: Path
) -> None:
    keys = await begin_run(redis, run_config, columns=ROW, agent="my_agent:waits_between_turns")
    waiting = directory / "waiting"
    async with generator(redis, keys, counts) as fake:
        with service(redis_url, directory, HEADRACE_REPLICA_ID="a") as first:
            await eventually(lambda: (waiting.exists() and waiting.read_text() == "xx") or not first.is_alive())
            assert first.is_alive(), first.log()
        (directory / "go").touch()
        with service(redis_url, directory, HEADRACE_REPLICA_ID="b") as second:
            group = await completed(redis, keys, process=second)
    assert [stamp.by for stamp in group.stamps] == ["b", "b"]
    for rollout in group.rollouts:
        (row,) = rollout.rows
        assert row.sampled_ids().tolist() == [11, 2, 21, 2]
    assert sum(request.n for request in fake.requests) == 4, "two turns for each rollout"


@contextlib.asynccontextmanager
async def agent_server() -> AsyncGenerator[str]:
    """Serve a program that asks for one turn and reports the length of the answer as its reward."""
    app = FastAPI()

    @app.post("/play", response_model=None)
    async def play(request: Request) -> dict[str, float]:
        body = await request.json()
        assert body["row"] == ROW
        async with openai.AsyncOpenAI(base_url=body["base_url"], api_key=body["api_key"]) as client:
            said = await client.chat.completions.create(model="any", messages=body["prompt"])
        return {"reward": float(len(said.choices[0].message.content or ""))}

    async with served(app) as url:
        yield url


async def test_rollouts_share_no_cookies_and_no_connections() -> None:
    app, cookies, ports = FastAPI(), list[str | None](), set[int]()

    @app.post("/play", response_model=None)
    async def play(request: Request, response: Response) -> None:
        assert request.client is not None
        cookies.append(request.headers.get("cookie"))
        ports.add(request.client.port)
        response.set_cookie("rollout", "this one")

    async with served(app) as url, agent_http_client() as http:
        for _ in range(2):
            (await http.post(f"{url}/play")).raise_for_status()
    assert cookies == [None, None]
    assert len(ports) == 2


@pytest.mark.slow
async def test_a_program_behind_a_url_of_an_allowed_origin_plays_rollouts(
    redis: Redis, redis_url: str, run_config: RunConfig, directory: Path
) -> None:
    async with agent_server() as url:
        keys = await begin_run(redis, run_config, columns=ROW, agent=f"{url}/play")
        async with generator(redis, keys, counts):
            with service(redis_url, directory, HEADRACE_AGENT_ORIGINS=url) as process:
                group = await completed(redis, keys, process=process)
    assert [rollout.lost for rollout in group.rollouts] == ["", ""]
    assert [rollout.completion for rollout in group.rollouts] == [[assistant("1")]] * 2
    assert rewards(group) == [1.0, 1.0]


@pytest.mark.slow
async def test_runs_whose_programs_cannot_be_used_are_refused(
    redis: Redis, redis_url: str, run_config: RunConfig, directory: Path
) -> None:
    reasons = {
        "http://127.0.0.1:9/play": "agent programs at http://127.0.0.1:9 are not allowed",
        "my_agent:missing": "module my_agent has no function missing",
        "my_agent:note": "my_agent:note does not take base_url and api_key",
    }
    runs = [
        await begin_run(redis, run_config, run_id=f"run-{number}", columns=ROW, agent=agent)
        for number, agent in enumerate(reasons)
    ]
    with service(redis_url, directory) as process:
        for keys, reason in zip(runs, reasons.values(), strict=True):
            assert reason in await why_refused(redis, keys, process=process)
