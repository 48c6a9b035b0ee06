"""Stores the registered endpoints in Redis. All rewarders share them, and they survive a restart of the rewarders.

    POST, DELETE --> hash headrace:reward_endpoints: name -> specification as JSON --> read again after a second

Every call of a run looks up a name, so the whole hash is read at once and cached. While Redis does not answer, the last
copy is used. Deleted names are remembered, so that errors can tell them from names that never existed.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Literal, cast

from pydantic import ValidationError
from redis.exceptions import RedisError

from services.rewarder.endpoints.spec import EndpointSpec
from shared.errors import UnavailableError
from shared.redis.keys import REWARD_ENDPOINTS
from shared.redis.redis_connection import Redis, patiently, translate

log = logging.getLogger(__name__)

MAX_ENDPOINTS = 1000
REREAD_AFTER_S = 1.0
_PATIENCE_S = 5.0
Written = Literal["created", "unchanged", "replaced", "different", "too-many"]


@dataclass(frozen=True)
class Registered:
    """The registered reward endpoints, by name, and the names whose record this release cannot read."""

    specs: dict[str, EndpointSpec] = field(default_factory=dict[str, EndpointSpec])
    unreadable: frozenset[str] = frozenset()


class Registry:
    """Reads, writes and caches the registered reward endpoints, which are a hash in Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._known: Registered | None = None
        self._raw: dict[bytes, bytes] | None = None
        self._gone: set[str] = set()
        self._read_at = -REREAD_AFTER_S
        self._reading: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()

    async def registered(self) -> Registered:
        """Return the registered endpoints. The copy is at most about one second old while Redis answers.

        Raises:
            UnavailableError: Redis has not answered yet.
        """
        if time.monotonic() - self._read_at >= REREAD_AFTER_S:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self.read(), name="read reward endpoints")
            await asyncio.shield(self._reading)
        if self._known is None:
            raise UnavailableError("the registered reward endpoints could not be read: Redis does not answer")
        return self._known

    def is_gone(self, name: str) -> bool:
        """Return whether this process has seen the endpoint ``name`` registered, and it has been deleted since."""
        return name in self._gone

    async def read(self) -> None:
        """Read the registered endpoints from Redis now; if it does not answer, keep the last copy.

        Reads run one at a time, because a slow older read would bring back deleted endpoints.
        """
        try:
            async with self._one_at_a_time, asyncio.timeout(_PATIENCE_S):
                found = cast("dict[bytes, bytes]", await self._redis.hgetall(REWARD_ENDPOINTS))
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            log.warning("the registered reward endpoints cannot be read: %s", error)
            self._read_at = time.monotonic()
            return
        self._read_at = time.monotonic()
        if found == self._raw:
            return
        before = set[str]() if self._known is None else set(self._known.specs)
        self._known, self._raw = _decoded(found), found
        self._gone = (self._gone | before) - set(self._known.specs)
        while len(self._gone) > MAX_ENDPOINTS:
            self._gone.pop()

    async def write(self, name: str, spec: EndpointSpec, *, replace: bool) -> Written:
        """Register ``spec`` under ``name``. A different specification there is replaced only if ``replace`` is true.

        Return what was done. ``different`` and ``too-many`` mean that ``spec`` is not stored.

        Raises:
            UnavailableError: Redis did not answer, or is full. Trying again is safe, even if the endpoint was written.
        """

        async def once() -> Written:
            data = spec.model_dump_json()
            if await self._redis.hsetnx(REWARD_ENDPOINTS, name, data):
                if await self._redis.hlen(REWARD_ENDPOINTS) <= MAX_ENDPOINTS:
                    return "created"
                await self._redis.hdel(REWARD_ENDPOINTS, name)
                return "too-many"
            there = await self._redis.hget(REWARD_ENDPOINTS, name)
            if there is None:  # deleted after the hsetnx
                return await once()
            if _spec(cast("bytes | None", there)) == spec:
                return "unchanged"
            if not replace:
                return "different"
            await self._redis.hset(REWARD_ENDPOINTS, name, data)
            return "replaced"

        return cast("Written", await self._asked(once, "registering a reward endpoint"))

    async def delete(self, name: str) -> bool:
        """Delete an endpoint; return whether it existed.

        Raises:
            UnavailableError: Redis did not answer.
        """
        return bool(await self._asked(lambda: self._redis.hdel(REWARD_ENDPOINTS, name), "deleting a reward endpoint"))

    async def aclose(self) -> None:
        """Cancel a read of the endpoints that is under way."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _asked(self, make: object, what: str) -> object:
        try:
            found: object = await patiently(make, what=what, timeout_s=_PATIENCE_S, waits_for_room=False)
        except RedisError as error:
            raise translate(error) from error
        await self.read()
        return found


def _decoded(found: dict[bytes, bytes]) -> Registered:
    specs: dict[str, EndpointSpec] = {}
    unreadable: set[str] = set()
    for key, data in found.items():
        name = key.decode("utf-8", "replace")
        spec = _spec(data)
        if spec is None:
            log.warning("the record of reward endpoint %.64s cannot be read by this release", name)
            unreadable.add(name)
        else:
            specs[name] = spec
    return Registered(specs, frozenset(unreadable))


def _spec(data: bytes | None) -> EndpointSpec | None:
    if data is None:
        return None
    try:
        return EndpointSpec.model_validate_json(data)
    except ValidationError:
        return None
