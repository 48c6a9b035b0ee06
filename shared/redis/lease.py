"""Keeps a consumer's lease alive while its process lives.

    lease missing or expired  ==  the consumer is dead  ==>  others may reclaim its entries

A lease does not limit how long work may take. A clean shutdown gives the lease back at once.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from redis.exceptions import RedisError

from shared.errors import HeadraceError, UnavailableError
from shared.redis.redis_connection import Redis, call, patiently

log = logging.getLogger(__name__)

LEASE_S = 15.0
"""Seconds without a renewal after which a consumer counts as dead."""


async def _nothing() -> None:
    """Do nothing more after the renewal of a lease."""


@contextlib.asynccontextmanager
async def lease(
    redis: Redis,
    *,
    leases: str,
    consumer: str,
    lease_s: float = LEASE_S,
    then: Callable[[], Awaitable[None]] = _nothing,
) -> AsyncGenerator[None]:
    """Hold a lease for ``consumer`` while the body runs. ``then`` is called after each renewal."""
    await renew(redis, leases=leases, consumer=consumer, lease_s=lease_s)
    task = asyncio.create_task(
        _renew_for_ever(redis, leases=leases, consumer=consumer, lease_s=lease_s, then=then),
        name=f"lease of {consumer}",
    )
    try:
        yield
    finally:
        task.cancel()
        try:
            await asyncio.gather(task, return_exceptions=True)  # raises only a cancellation of this task
        finally:
            with contextlib.suppress(UnavailableError):
                await patiently(
                    lambda: redis.zrem(leases, consumer),
                    what="giving the lease back",
                    timeout_s=1.0,
                    waits_for_room=False,
                )
    if not task.cancelled():
        task.result()


async def renew(redis: Redis, *, leases: str, consumer: str, lease_s: float = LEASE_S) -> None:
    """Extend the lease of ``consumer`` to ``lease_s`` seconds from now."""
    await call(redis, "headrace_renew", keys=(leases,), args=(consumer, int(lease_s * 1000)))


async def alive(redis: Redis, *, leases: str) -> set[str]:
    """Return the consumers whose lease has not expired."""
    names = await call(redis, "headrace_alive", keys=(leases,))
    return {name.decode() for name in names}


async def _renew_for_ever(
    redis: Redis, *, leases: str, consumer: str, lease_s: float, then: Callable[[], Awaitable[None]]
) -> None:
    while True:
        await asyncio.sleep(lease_s / 3)
        try:
            await renew(redis, leases=leases, consumer=consumer, lease_s=lease_s)
            await then()
        except (HeadraceError, RedisError) as error:  # a wiped server gets its functions and users back a bit later
            log.warning("lease of %s could not be renewed: %s", consumer, error)
