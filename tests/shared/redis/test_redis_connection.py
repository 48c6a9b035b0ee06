"""What our connection adds to redis-py: calls can always be cancelled, and a fail-over is waited for."""

import asyncio
import random
from pathlib import Path

import pytest

from shared.errors import StateLostError, UnavailableError
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import MAX_CONNECTIONS, Redis, call, connect, patiently
from shared.redis.redis_readiness import wait_until_ready
from tests.conftest import RedisServer
from tests.eventually import eventually
from tests.shared.redis.prompts_stream import generator

pytestmark = pytest.mark.unit


async def test_a_task_that_talks_to_redis_ends_whenever_it_is_cancelled(redis: Redis) -> None:
    async def talk() -> None:
        while True:
            await redis.hset("talk", "field", "value")
            await asyncio.sleep(0)

    chance = random.Random(0)
    await redis.ping()
    for _ in range(300):
        task = asyncio.create_task(talk(), name="talk")
        for _ in range(chance.randint(1, 40)):
            await asyncio.sleep(0)
        task.cancel()
        _, pending = await asyncio.wait({task}, timeout=120)
        assert not pending, "its cancellation was lost"


async def test_an_unreachable_redis_is_given_up_after_the_timeout() -> None:
    client = connect("redis://127.0.0.1:1/0")
    with pytest.raises(UnavailableError, match=r"Redis PING failed for 0 s"):
        await patiently(lambda: client.ping(), what="Redis PING", timeout_s=0.2)
    await client.aclose()


async def test_more_calls_at_once_than_connections_wait_for_one_and_none_fails(redis: Redis, redis_url: str) -> None:
    client = connect(redis_url)
    before = (await redis.info("clients"))["connected_clients"]
    async with asyncio.timeout(120):
        answers = await asyncio.gather(*(client.xread({"nothing": "$"}, block=20) for _ in range(5 * MAX_CONNECTIONS)))
    assert not any(answers)
    assert (await redis.info("clients"))["connected_clients"] - before == MAX_CONNECTIONS
    await client.aclose()


async def test_a_server_that_became_a_replica_is_waited_for_as_one_that_is_away(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    client, other = connect(server.url), connect(server.url)
    keys = RunKeys("run-failover")
    try:
        await wait_until_ready(client, timeout_s=120)
        await client.xgroup_create(keys.prompts, GENERATORS, id="0", mkstream=True)
        reading = asyncio.create_task(generator(client, keys).read(count=1, block_s=5.0))
        await eventually(lambda: blocked_clients(other))
        await other.replicaof("127.0.0.1", "1")
        assert await asyncio.wait_for(reading, 120) == []
        renewing = asyncio.create_task(call(client, "headrace_renew", keys=("leases",), args=("g", 1000)))
        await asyncio.wait({renewing}, timeout=0.5)
        assert not renewing.done()
        await other.replicaof("NO", "ONE")
        assert await asyncio.wait_for(renewing, 120) == 1
    finally:
        await client.aclose()
        await other.aclose()
        server.kill()


async def blocked_clients(client: Redis) -> int:
    return int((await client.info("clients"))["blocked_clients"])


async def test_a_call_to_a_server_that_was_wiped_brings_our_functions_back(redis: Redis) -> None:
    await redis.function_flush()
    assert await call(redis, "headrace_alive", keys=("nothing",)) == []


async def test_a_call_does_not_replace_functions_of_another_release(redis: Redis) -> None:
    other = "#!lua name=headrace\nredis.register_function('old', function() return 1 end)"
    await redis.function_load(other, True)
    with pytest.raises(StateLostError, match="lost headrace's functions"):
        await call(redis, "headrace_alive", keys=("nothing",))
    assert await redis.fcall("old", 0) == 1
