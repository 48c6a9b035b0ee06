"""Which endpoints a rewarder caches after reading the registry."""

from typing import Any, cast

import pytest

from services.rewarder.endpoints.registry import Registry
from shared.redis.redis_connection import Redis

pytestmark = pytest.mark.unit


class FakeRedis:
    """A Redis with one hash."""

    def __init__(self) -> None:
        self.found: dict[bytes, bytes] = {b"judge": b'{"url": "https://judge.example/"}', b"later": b'{"since": "2.0"}'}

    async def hgetall(self, _key: str) -> dict[bytes, bytes]:
        return dict(self.found)


async def test_records_that_did_not_change_are_parsed_and_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    redis = FakeRedis()
    registry = Registry(cast("Redis", cast("Any", redis)))
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
    del redis.found[b"judge"]
    await registry.read()
    assert registry.is_gone("judge")
    redis.found[b"judge"] = b'{"url": "https://judge.example/v2"}'
    await registry.read()
    assert not registry.is_gone("judge")
    assert (await registry.registered()).specs["judge"].url == "https://judge.example/v2"
