"""A generator stays listed, and keeps its lease, on a Redis that loses what it was told."""

from typing import Any

import pytest

from services.generator.registration import in_fleet, registered
from shared.redis.keys import FLEET, FLEET_LEASES, RunKeys
from shared.redis.lease import alive, lease
from shared.redis.redis_connection import Redis, connect
from shared.redis.redis_readiness import wait_until_ready
from shared.registration import Registration, decode_registration
from tests.eventually import eventually

pytestmark = pytest.mark.unit

URL = "http://127.0.0.1:8001"


async def listed(redis: Redis, key: str) -> Registration | None:
    """Return the entry of the replica in a list of generators."""
    entries: Any = await redis.hgetall(key)
    return decode_registration(entries[b"generator-0"]) if b"generator-0" in entries else None


async def test_a_generator_is_listed_again_after_redis_lost_its_entries(redis: Redis, run_keys: RunKeys) -> None:
    seat: dict[str, Any] = {"replica_id": "generator-0", "url": URL, "patience_s": 5.0}
    async with in_fleet(redis, **seat), registered(redis, run_keys, **seat) as generator:
        await generator.serve()
        await redis.flushdb()

        async def is_back() -> bool:
            entries = [await listed(redis, key) for key in (FLEET, run_keys.generators)]
            return entries == [Registration(URL)] * 2

        await eventually(is_back, within_s=60)
    assert await redis.exists(FLEET, run_keys.generators) == 0


async def test_a_generator_that_has_left_a_run_is_not_listed_again(redis: Redis, run_keys: RunKeys) -> None:
    """It leaves before its lease ends, so that the trainer can tell leaving from failing."""
    async with registered(redis, run_keys, replica_id="generator-0", url=URL, patience_s=5.0) as generator:
        await generator.leave()
        await generator.stay()
        assert await listed(redis, run_keys.generators) is None


async def test_a_lease_outlives_a_wiped_server_whose_functions_its_holder_may_not_load(
    redis: Redis, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    admin: Any = redis
    rights = ("~headrace:*", "-@all", "+fcall", "+time", "+zadd", "+zrem", "+function|list")
    await admin.execute_command("ACL", "SETUSER", "replica", "on", ">pw", *rights)
    client = connect(redis_url.replace("redis://", "redis://replica:pw@"))
    try:
        async with lease(client, leases=FLEET_LEASES, consumer="generator-0", lease_s=0.3):
            await admin.flushall()
            await admin.function_flush()
            await eventually(lambda: "lease of generator-0 could not be renewed" in caplog.text, within_s=60)
            await wait_until_ready(redis, timeout_s=120)

            async def is_alive() -> bool:
                return await alive(redis, leases=FLEET_LEASES) == {"generator-0"}

            await eventually(is_alive, within_s=60)
    finally:
        await client.aclose()
        await admin.execute_command("ACL", "DELUSER", "replica")
