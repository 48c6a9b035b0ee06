"""Makes this replica known: to the fleet for as long as it lives, and to the trainer of the run that it serves.

registered --"loading the model"--+--> serve()      takes prompts; whatever it refused before is forgotten
                                  +--> refuse(why)  stays, so that people see it, until the run is over

A lease says that it is alive, and makes its work reclaimable when it is not.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

import msgspec
from redis.exceptions import RedisError

from shared import refusals
from shared.keys import FLEET, FLEET_LEASES, GENERATORS, RunKeys
from shared.lease import lease
from shared.redis_connection import Redis, patiently
from shared.registration import Registration
from shared.streams import give_back

log = logging.getLogger(__name__)

LOADING = "loading the model"
_FAREWELL_S = 1.0


class Seat:
    """This replica's place among a run's generators.

    Args:
        redis: Client of redis_connection.py.
        keys: Keys of the run.
        replica_id: Stable name.
        url: Where the trainer reaches it.
        patience_s: How long Redis may be away.
    """

    def __init__(self, redis: Redis, keys: RunKeys, *, replica_id: str, url: str, patience_s: float) -> None:
        self._redis = redis
        self._keys = keys
        self._replica_id = replica_id
        self._url = url
        self._patience_s = patience_s

    async def take(self) -> None:
        """Be listed, as one that does not serve yet."""
        await self._write(LOADING)

    async def serve(self) -> None:
        """Say that an engine serves the run."""
        await self._write("")
        await self.take_back()

    async def refuse(self, reason: str) -> None:
        """Say that this replica cannot serve the run, and why; the prompts it had claimed are for others."""
        await self._write("unable to serve this run")
        await give_back(self._redis, stream=self._keys.prompts, consumer_group=GENERATORS, name=self._replica_id)
        await refusals.refuse(self._redis, "generator", self._replica_id, reason, run_id=self._keys.run_id)

    async def take_back(self) -> None:
        """Forget what was refused."""
        await refusals.take_back(self._redis, "generator", self._replica_id, run_id=self._keys.run_id)

    async def leave(self) -> None:
        """Be listed no more."""
        await _remove(self._redis, self._keys.generators, self._replica_id)

    async def _write(self, doing: str) -> None:
        entry = Registration(self._url, doing)
        await _enter(self._redis, self._keys.generators, self._replica_id, entry, patience_s=self._patience_s)


@contextlib.asynccontextmanager
async def registered(
    redis: Redis, keys: RunKeys, *, replica_id: str, url: str, patience_s: float
) -> AsyncGenerator[Seat]:
    """Hold a lease and be listed among the run's generators while the body runs."""
    seat = Seat(redis, keys, replica_id=replica_id, url=url, patience_s=patience_s)
    await seat.take()
    try:
        async with lease(redis, leases=keys.leases(GENERATORS), consumer=replica_id):
            yield seat
    finally:
        await seat.leave()


@contextlib.asynccontextmanager
async def in_fleet(redis: Redis, *, replica_id: str, url: str, patience_s: float) -> AsyncGenerator[None]:
    """Hold a lease and be listed among all generators while the body runs."""
    await _enter(redis, FLEET, replica_id, Registration(url), patience_s=patience_s)
    try:
        async with lease(redis, leases=FLEET_LEASES, consumer=replica_id):
            yield
    finally:
        await _remove(redis, FLEET, replica_id)


async def _enter(redis: Redis, listed_in: str, replica_id: str, entry: Registration, *, patience_s: float) -> None:
    data = msgspec.json.encode(entry)
    await patiently(
        lambda: redis.hset(listed_in, replica_id, data), what="registering this generator", timeout_s=patience_s
    )


async def _remove(redis: Redis, listed_in: str, replica_id: str) -> None:
    """Take an entry out. A replica that cannot say goodbye is told by its expired lease."""
    with contextlib.suppress(RedisError, OSError, TimeoutError):
        async with asyncio.timeout(_FAREWELL_S):
            await redis.hdel(listed_in, replica_id)
