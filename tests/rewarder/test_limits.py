"""Limits of a rewarder: concurrent requests over HTTP, and concurrent calls of one function."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import RedisServer
from tests.kept_ports import kept_port
from tests.rewarder.conftest import RewarderProcess, shared_rewarder, until, user
from tests.shared_process import SharedProcess, lent

KEY = {"Authorization": "Bearer key-of-the-test"}
JUDGE, PACED = user("begins_and_ends"), user("without_kwargs")


@pytest.fixture(scope="module")
def metrics_url() -> str:
    return f"http://127.0.0.1:{kept_port()}/metrics"


@pytest.fixture(scope="module")
def shared(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, metrics_url: str
) -> Iterator[SharedProcess[RewarderProcess]]:
    """Share a rewarder that handles two requests at a time and lets one more wait."""
    log_file = tmp_path_factory.mktemp("narrow") / "rewarder.log"
    settings = {
        "HEADRACE_MAX_INFLIGHT_REQUESTS": "2",
        "HEADRACE_MAX_QUEUED_REQUESTS": "1",
        "HEADRACE_REWARD_LIMITS": json.dumps({JUDGE: {"max_concurrency": 1}}),
        "HEADRACE_METRICS_PORT": str(httpx.URL(metrics_url).port),
    }
    with shared_rewarder(redis_server.url, log_file, **settings) as shared:
        yield shared
    assert "Traceback" not in log_file.read_text(), log_file.read_text()


@pytest.fixture
def narrow(shared: SharedProcess[RewarderProcess]) -> Iterator[RewarderProcess]:
    yield from lent(shared)


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


async def until_waiting(client: httpx.AsyncClient, metrics_url: str, *, how_many: int = 1) -> None:
    """Return when this number of requests waits."""
    line = f'headrace_reward_queue_depth{{lane="http",queue="requests"}} {float(how_many)}'

    async def are_waiting() -> bool:
        return line in (await client.get(metrics_url)).text.splitlines()

    await until(are_waiting, what=f"{how_many} to wait")


async def two_under_way(client: httpx.AsyncClient, directory: Path) -> "list[asyncio.Task[httpx.Response]]":
    """Return two requests that end when the file ``go`` exists."""
    waits = body(user("waits_for_go"), directory=str(directory))
    worked_on = [asyncio.create_task(client.post("/v1/score", json=waits)) for _ in range(2)]

    async def have_started() -> bool:
        return await asyncio.to_thread(lambda: len(list(directory.glob("started-*"))) == 2)

    await until(have_started, what="two requests under way")
    return worked_on


async def test_more_requests_than_fit_get_a_429_and_waiting_requests_are_answered(
    client: httpx.AsyncClient, metrics_url: str, tmp_path: Path
) -> None:
    worked_on = await two_under_way(client, tmp_path)
    queued = asyncio.create_task(client.post("/v1/rewards/check", json={"reward_funcs": [JUDGE]}))
    await until_waiting(client, metrics_url)
    refused = await client.post("/v1/score", json=body(user("one")))
    assert refused.status_code == 429, refused.text
    assert refused.headers["content-type"] == "application/problem+json"
    assert int(refused.headers["retry-after"]) >= 1
    assert "2 requests are being handled and 1 wait" in refused.json()["detail"]
    large = await client.post("/v1/score", json=body(user("one"), text="x" * 7_000_000))
    assert large.status_code == 429, "a client with a large body reads the reason too"
    assert (await client.post("/v1/rewards/nobody/test", json={})).status_code == 429
    assert (await client.get("/v1/rewards")).status_code == 200, "a request without cost is not refused"
    (tmp_path / "go").touch()
    assert [reply.json()["rewards"] for reply in await asyncio.gather(*worked_on)] == [[1.0], [1.0]]
    assert (await queued).status_code == 200
    assert (await client.post("/v1/score", json=body(user("one")))).json()["rewards"] == [1.0]


async def test_a_client_that_hangs_up_leaves_its_place_and_no_trace_in_the_log(
    client: httpx.AsyncClient, narrow: RewarderProcess, metrics_url: str, tmp_path: Path
) -> None:
    def request(*, num_bytes_missing: int = 0) -> bytes:
        data = json.dumps(body(user("one"))).encode()
        head = f"POST /v1/score HTTP/1.1\r\nHost: here\r\nAuthorization: {KEY['Authorization']}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data) + num_bytes_missing}\r\n\r\n"
        return head.encode() + data

    worked_on = await two_under_way(client, tmp_path)
    for missing in (0, 10):
        _, writer = await asyncio.open_connection("127.0.0.1", narrow.port)
        writer.write(request(num_bytes_missing=missing))
        await until_waiting(client, metrics_url)
        writer.close()
        await until_waiting(client, metrics_url, how_many=0)
    (tmp_path / "go").touch()
    await asyncio.gather(*worked_on)
    reader, writer = await asyncio.open_connection("127.0.0.1", narrow.port)
    writer.write(request(num_bytes_missing=10))
    writer.write_eof()
    assert await reader.read() == b"", "no client gets an answer, and this rewarder's log is checked at the end"
    writer.close()


async def test_a_function_is_called_no_more_often_at_a_time_than_its_limit(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    asked = body(JUDGE, directory=str(tmp_path))
    replies = await asyncio.gather(*(client.post("/v1/score", json=asked) for _ in range(2)))
    assert [reply.json()["rewards"] for reply in replies] == [[1.0], [1.0]]
    calls = (tmp_path / "calls").read_text(encoding="ascii").split()
    assert calls == ["begin", "end"] * 2, "the second began before the first had ended"


async def test_a_function_is_called_no_more_often_a_minute_than_its_limit(
    start_rewarder: Callable[..., RewarderProcess],
) -> None:
    limits = json.dumps({PACED: {"requests_per_minute": 3}})
    rewarder = start_rewarder(HEADRACE_REWARD_LIMITS=limits, HEADRACE_QUEUE_TIMEOUT_S="1")
    await asyncio.to_thread(rewarder.wait_until_ready)
    async with httpx.AsyncClient(base_url=rewarder.url(""), headers=KEY, trust_env=False, timeout=60) as client:
        replies = [(await client.post("/v1/score", json=body(PACED))).json() for _ in range(3)]
        assert [reply["rewards"] for reply in replies] == [[0.5]] * 3
        (outcome,) = (await client.post("/v1/score", json=body(PACED))).json()["outcomes"][0]
    assert outcome["outcome"] == "overload"
    assert outcome["detail"] == "waited 1 s for its turn: 3 a minute (HEADRACE_REWARD_LIMITS)"
    assert outcome["version"] == replies[0]["outcomes"][0][0]["version"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("{", "HEADRACE_REWARD_LIMITS: it is not JSON"),
        ('{"my_rewards:judge": {"max_concurency": 1}}', "HEADRACE_REWARD_LIMITS"),
        ('{"my_rewards:judge": {"max_concurrency": 0}}', "greater than or equal to 1"),
        ('{"judge": {"max_concurrency": 1}}', "HEADRACE_REWARD_LIMITS: 'judge' is not a built-in reward"),
    ],
)
def test_limits_that_cannot_be_read_are_a_sentence_and_exit_status_2(
    start_rewarder: Callable[..., RewarderProcess], value: str, says: str
) -> None:
    rewarder = start_rewarder(HEADRACE_REWARD_LIMITS=value)
    assert rewarder.process.wait(timeout=120) == 2
    assert says in rewarder.log()
    assert "Traceback" not in rewarder.log()
