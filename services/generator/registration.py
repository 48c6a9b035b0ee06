"""Lists this replica in the fleet while its process lives, and among the generators of the run that it serves.

    registered --"loading the model"--+--> serve()      takes prompts; an earlier refusal is removed
                                      +--> refuse(why)  stays listed with the reason until the run is over

A lease shows that the replica is alive. When it expires, other replicas can reclaim the replica's work. The entry is
written again with each renewal, because a Redis that is killed or wiped loses it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

import msgspec
from redis.exceptions import RedisError

from shared import refusals
from shared.errors import NoRoomError
from shared.redis.keys import FLEET, FLEET_LEASES, GENERATORS, RunKeys
from shared.redis.lease import lease
from shared.redis.redis_connection import Redis, patiently
from shared.redis.streams import give_back
from shared.registration import Registration

log = logging.getLogger(__name__)

STARTING, LOADING = "starting", "loading the model"
_FAREWELL_S = 1.0


class Seat:
    """This replica's entry in a run's list of generators.

    Args:
        redis: Client made by redis_connection.py.
        keys: Redis keys of the run.
        replica_id: Stable name of the replica.
        url: URL at which the trainer reaches the replica.
        patience_s: How long Redis may be unreachable, in seconds.
    """

    def __init__(self, redis: Redis, keys: RunKeys, *, replica_id: str, url: str, patience_s: float) -> None:
        self._redis = redis
        self._keys = keys
        self._replica_id = replica_id
        self._url = url
        self._patience_s = patience_s
        self._doing: str | None = None

    async def take(self) -> None:
        """Add this replica to the list. Its entry says that it is loading the model."""
        await self._write(LOADING)

    async def serve(self) -> None:
        """List this replica as serving the run, and delete an earlier report that it cannot serve the run."""
        await self._write("")
        await self.take_back()

    async def refuse(self, reason: str) -> None:
        """Report that this replica cannot serve the run, and why. Leave its claimed prompts to other replicas."""
        await self._write("unable to serve this run")
        await give_back(self._redis, stream=self._keys.prompts, consumer_group=GENERATORS, name=self._replica_id)
        await refusals.refuse(self._redis, "generator", self._replica_id, reason, run_id=self._keys.run_id)

    async def take_back(self) -> None:
        """Delete the report of why this replica could not serve the run."""
        await refusals.take_back(self._redis, "generator", self._replica_id, run_id=self._keys.run_id)

    async def stay(self) -> None:
        """Write the entry again, in case Redis has lost it. Do nothing after ``leave``."""
        if self._doing is not None:
            entry = Registration(self._url, self._doing)
            await _enter_again(self._redis, self._keys.generators, self._replica_id, entry, patience_s=self._patience_s)

    async def leave(self) -> None:
        """Remove this replica from the list."""
        self._doing = None
        await _remove(self._redis, self._keys.generators, self._replica_id)

    async def _write(self, doing: str) -> None:
        self._doing = doing
        entry = Registration(self._url, doing)
        await _enter(self._redis, self._keys.generators, self._replica_id, entry, patience_s=self._patience_s)


@contextlib.asynccontextmanager
async def registered(
    redis: Redis, keys: RunKeys, *, replica_id: str, url: str, patience_s: float
) -> AsyncGenerator[Seat]:
    """Hold a lease and be listed among the run's generators while the block runs. Yields the entry in the list."""
    seat = Seat(redis, keys, replica_id=replica_id, url=url, patience_s=patience_s)
    await seat.take()
    try:
        async with lease(redis, leases=keys.leases(GENERATORS), consumer=replica_id, then=seat.stay):
            yield seat
    finally:
        await seat.leave()


@contextlib.asynccontextmanager
async def in_fleet(
    redis: Redis, *, replica_id: str, url: str, patience_s: float, doing: str = ""
) -> AsyncGenerator[None]:
    """Hold a lease and be listed among all generators while the block runs.

    ``doing`` describes the work that keeps the replica from serving runs, such as "starting"; empty if there is none.
    """
    entry = Registration(url, doing)

    async def stay() -> None:
        await _enter_again(redis, FLEET, replica_id, entry, patience_s=patience_s)

    await _enter(redis, FLEET, replica_id, entry, patience_s=patience_s)
    try:
        async with lease(redis, leases=FLEET_LEASES, consumer=replica_id, then=stay):
            yield
    finally:
        await _remove(redis, FLEET, replica_id)


async def _enter(
    redis: Redis,
    listed_in: str,
    replica_id: str,
    entry: Registration,
    *,
    patience_s: float,
    waits_for_room: bool = True,
) -> None:
    data = msgspec.json.encode(entry)
    await patiently(
        lambda: redis.hset(listed_in, replica_id, data),
        what="registering this generator",
        timeout_s=patience_s,
        waits_for_room=waits_for_room,
    )


async def _enter_again(
    redis: Redis, listed_in: str, replica_id: str, entry: Registration, *, patience_s: float
) -> None:
    """Write an entry again, in case Redis has lost it. Ignore that Redis is full: it usually still has it."""
    with contextlib.suppress(NoRoomError):
        await _enter(redis, listed_in, replica_id, entry, patience_s=patience_s, waits_for_room=False)


async def _remove(redis: Redis, listed_in: str, replica_id: str) -> None:
    """Remove an entry. If Redis does not answer, the expired lease will show that the replica is gone."""
    with contextlib.suppress(RedisError, OSError, TimeoutError):
        async with asyncio.timeout(_FAREWELL_S):
            await redis.hdel(listed_in, replica_id)
