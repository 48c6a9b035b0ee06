"""Which endpoints a rewarder caches after reading the registry, and what it answers if it cannot read it."""

from typing import Any, cast

import fastapi
import httpx
import pytest
import redis

from services.rewarder.endpoints.registry import Registry
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.score_api.bodies import RewardFunctionInfo
from services.rewarder.score_api.endpoint_routes import add_reward_routes
from shared.redis.redis_connection import Redis
from tests.rewarder.endpoints.conftest import endpoints_on

pytestmark = pytest.mark.unit


class FakeRedis:
    """A Redis with one hash."""

    def __init__(self) -> None:
        self.is_read = True
        self.found: dict[bytes, bytes] = {b"judge": b'{"url": "https://judge.example/"}', b"later": b'{"since": "2.0"}'}

    async def hgetall(self, _key: str) -> dict[bytes, bytes]:
        if not self.is_read:
            raise redis.ConnectionError("it does not answer")
        return dict(self.found)

    async def hsetnx(self, _key: str, name: str, value: str) -> bool:
        self.found[name.encode()] = value.encode()
        return True

    async def hlen(self, _key: str) -> int:
        return len(self.found)


async def test_records_that_did_not_change_are_parsed_and_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    stored = FakeRedis()
    registry = Registry(cast("Redis", cast("Any", stored)))
    await registry.read()
    first = await registry.registered()
    for _ in range(3):
        await registry.read()
    assert await registry.registered() is first
    assert set(first.specs) == {"judge"}
    assert first.unreadable == {"later"}
    assert [record.message for record in caplog.records] == [
        "the record of reward endpoint later cannot be read by this release"
    ]
    del stored.found[b"judge"]
    await registry.read()
    assert registry.is_gone("judge")
    stored.found[b"judge"] = b'{"url": "https://judge.example/v2"}'
    await registry.read()
    assert not registry.is_gone("judge")
    assert (await registry.registered()).specs["judge"].url == "https://judge.example/v2"


@pytest.mark.parametrize("was_read_before", [True, False])
async def test_a_stored_endpoint_is_shown_also_if_redis_stops_answering_then(
    metrics: RewarderMetrics, was_read_before: bool
) -> None:
    stored = FakeRedis()
    async with endpoints_on(cast("Redis", cast("Any", stored)), metrics=metrics) as endpoints:
        if was_read_before:
            await endpoints.clients()
        stored.is_read = False
        app = fastapi.FastAPI()
        add_reward_routes(app, endpoints, busy={}, listed=list[RewardFunctionInfo])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://rewarder") as client:
            body = {"name": "new", "url": "http://127.0.0.1:1/score", "timeout_s": 5}
            reply = await client.post("/v1/rewards", json=body)
    assert (reply.status_code, reply.headers.get("location")) == (201, "/v1/rewards/new"), reply.text
    shown = reply.json()
    assert (shown["name"], shown["endpoint"]["url"], shown["endpoint"]["timeout_s"]) == ("new", body["url"], 5.0)
    assert b"new" in stored.found
