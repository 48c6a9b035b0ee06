"""A lease is given back when its block ends, however it ends."""

import asyncio

import pytest

from shared.redis.lease import alive, lease
from shared.redis.redis_connection import Redis

LEASES = "test:leases"


async def test_a_cancellation_while_a_lease_is_given_back_is_not_lost(redis: Redis) -> None:
    has_gone_on = False

    async def hold() -> None:
        nonlocal has_gone_on
        me = asyncio.current_task()
        assert me is not None
        async with lease(redis, leases=LEASES, consumer="a"):
            await asyncio.sleep(0)  # the task that renews the lease has begun
            assert await alive(redis, leases=LEASES) == {"a"}
            asyncio.get_running_loop().call_soon(me.cancel)  # it comes when the block has ended
        has_gone_on = True

    holding = asyncio.create_task(hold(), name="holder of the lease")
    await asyncio.wait({holding})
    assert holding.cancelled()
    assert not has_gone_on
    assert await alive(redis, leases=LEASES) == set(), "it was given back all the same"


async def test_an_unexpected_error_of_the_renewal_is_raised_at_the_end(redis: Redis) -> None:
    renewed = asyncio.Event()

    async def then() -> None:
        renewed.set()
        raise LookupError("a defect")

    with pytest.raises(LookupError, match="a defect"):
        async with lease(redis, leases=LEASES, consumer="a", lease_s=0.03, then=then):
            await renewed.wait()
    assert await alive(redis, leases=LEASES) == set()
