"""What a rewarder takes at a time: requests over HTTP, and calls of one function."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import RedisServer, free_port
from tests.rewarder.conftest import RewarderProcess, until, user

KEY = {"Authorization": "Bearer key-of-the-test"}
JUDGE, PACED = user("half_a_second"), user("without_kwargs")


@pytest.fixture(scope="module")
def narrow(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a rewarder that works on two requests at a time and lets one wait."""
    limits = {JUDGE: {"max_concurrency": 1}, PACED: {"requests_per_minute": 3}}
    rewarder = RewarderProcess(
        redis_server.url,
        tmp_path_factory.mktemp("narrow") / "rewarder.log",
        HEADRACE_MAX_INFLIGHT_REQUESTS="2",
        HEADRACE_MAX_QUEUED_REQUESTS="1",
        HEADRACE_QUEUE_TIMEOUT_S="5",
        HEADRACE_REWARD_LIMITS=json.dumps(limits),
        HEADRACE_METRICS_PORT=str(free_port()),
    )
    try:
        rewarder.wait_until_ready()
        yield rewarder
        assert rewarder.stop() == 0, rewarder.log()
    finally:
        if rewarder.process.poll() is None:
            rewarder.kill()


@pytest.fixture
async def client(narrow: RewarderProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=narrow.url(""), headers=KEY, trust_env=False, timeout=60) as client:
        yield client


def body(function: str, **columns: str) -> dict[str, Any]:
    return {
        "reward_funcs": [function],
        "prompts": ["p"],
        "completions": ["c"],
        "columns": {name: [value] for name, value in columns.items()},
    }


async def test_more_requests_than_fit_get_a_429_and_those_that_wait_are_answered(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    async def have_started() -> bool:
        return await asyncio.to_thread(lambda: len(list(tmp_path.glob("started-*"))) == 2)

    waits = body(user("waits_for_go"), directory=str(tmp_path))
    worked_on = [asyncio.create_task(client.post("/v1/score", json=waits)) for _ in range(2)]
    await until(have_started, what="two requests under way")
    queued = asyncio.create_task(client.post("/v1/rewards/check", json={"reward_funcs": [JUDGE]}))

    async def is_refused() -> bool:
        # Until the third one has come to wait, this one does, and is given up.
        with_patience = httpx.Timeout(0.5)
        try:
            reply = await client.post("/v1/score", json=body(user("one")), timeout=with_patience)
        except httpx.TimeoutException:
            return False
        assert reply.status_code == 429, reply.text
        refusals.append(reply)
        return True

    refusals: list[httpx.Response] = []
    await until(is_refused, what="a 429")
    (refused,) = refusals
    assert refused.headers["content-type"] == "application/problem+json"
    assert int(refused.headers["retry-after"]) >= 1
    assert "2 requests are worked on and 1 wait" in refused.json()["detail"]
    large = await client.post("/v1/score", json=body(user("one"), text="x" * 7_000_000))
    assert large.status_code == 429, "also who sends a large body reads why"
    assert (await client.get("/v1/rewards")).status_code == 200, "what costs nothing is not refused"
    (tmp_path / "go").touch()
    assert [reply.json()["rewards"] for reply in await asyncio.gather(*worked_on)] == [[1.0], [1.0]]
    assert (await queued).status_code in (200, 429)
    assert (await client.post("/v1/score", json=body(user("one")))).json()["rewards"] == [1.0]


async def test_a_function_is_called_no_more_often_at_a_time_than_its_limit(client: httpx.AsyncClient) -> None:
    replies = await asyncio.gather(*(client.post("/v1/score", json=body(JUDGE)) for _ in range(2)))
    seconds = [reply.json()["outcomes"][0][0]["latency_s"] for reply in replies]
    assert [reply.json()["rewards"] for reply in replies] == [[1.0], [1.0]]
    assert max(seconds) < 5.0, "the time a call waits for its turn is not the function's"


async def test_a_function_is_called_no_more_often_a_minute_than_its_limit(client: httpx.AsyncClient) -> None:
    for _ in range(3):
        assert (await client.post("/v1/score", json=body(PACED))).json()["rewards"] == [0.5]
    (outcome,) = (await client.post("/v1/score", json=body(PACED))).json()["outcomes"][0]
    assert outcome["outcome"] == "overload"
    assert outcome["detail"] == "waited 5 s for its turn: 3 a minute (HEADRACE_REWARD_LIMITS)"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("{", "HEADRACE_REWARD_LIMITS: it is not JSON"),
        ('{"my_rewards:judge": {"max_concurency": 1}}', "HEADRACE_REWARD_LIMITS"),
        ('{"my_rewards:judge": {"max_concurrency": 0}}', "greater than or equal to 1"),
    ],
)
def test_limits_that_cannot_be_read_are_a_sentence_and_exit_status_2(
    start_rewarder: Callable[..., RewarderProcess], value: str, says: str
) -> None:
    rewarder = start_rewarder(HEADRACE_REWARD_LIMITS=value)
    assert rewarder.process.wait(timeout=60) == 2
    assert says in rewarder.log()
    assert "Traceback" not in rewarder.log()
