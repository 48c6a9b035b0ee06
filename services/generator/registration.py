"""Makes this replica known to a run's trainer, and its work reclaimable when it dies."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator

from redis.exceptions import RedisError

from shared.keys import GENERATORS, RunKeys
from shared.lease import lease
from shared.redis_connection import Redis, patiently

log = logging.getLogger(__name__)

_FAREWELL_S = 1.0


@contextlib.asynccontextmanager
async def registered(
    redis: Redis, keys: RunKeys, *, replica_id: str, url: str, patience_s: float
) -> AsyncGenerator[None]:
    """Hold a lease and be listed among the run's generators while the body runs."""
    await patiently(
        lambda: redis.hset(keys.generators, replica_id, json.dumps({"url": url})),
        what="registering this generator",
        timeout_s=patience_s,
    )
    try:
        async with lease(redis, leases=keys.leases(GENERATORS), consumer=replica_id):
            yield
    finally:
        # A replica that cannot say goodbye is told by its expired lease.
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await redis.hdel(keys.generators, replica_id)
