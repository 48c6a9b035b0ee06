"""Stores in Redis the reasons why replicas cannot serve, for users who look at a run.

    headrace:{RUN}:refusals   hash: "generator/ID", "rewarder/ID" or "sessions/ID" -> Refusal; until it serves the run,
                              or the run goes
    headrace:refusals         the same for replicas that ended before they followed any run; until they do, or for a day

They are only for people. No decision depends on them, and a replica that cannot write its reason goes on without.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from redis.exceptions import RedisError

from shared.errors import UnavailableError
from shared.message_invariants import Seconds
from shared.redis.keys import REFUSALS, RunKeys
from shared.redis.redis_connection import Redis, patiently

log = logging.getLogger(__name__)

Kind = Literal["generator", "rewarder", "sessions"]
_PATIENCE_S = 2.0
_FORGET_AFTER_S = 24 * 3600


class Refusal(msgspec.Struct, frozen=True):
    """The latest reason why one replica cannot serve. ``at_s`` is in Unix seconds."""

    kind: Kind
    replica_id: str
    reason: str
    at_s: Seconds


async def refuse(redis: Redis, kind: Kind, replica_id: str, reason: str, *, run_id: str | None) -> None:
    """Write why this replica cannot serve a run, or any run if ``run_id`` is None. Never raises an error of Redis."""
    data = msgspec.json.encode(Refusal(kind, replica_id, reason, time.time()))
    field = _field(kind, replica_id)

    async def write() -> None:
        if run_id is None:
            await redis.hset(REFUSALS, field, data)
            await redis.expire(REFUSALS, _FORGET_AFTER_S)
        elif await redis.exists(RunKeys(run_id).run):  # otherwise it would outlive a run that was deleted meanwhile
            await redis.hset(RunKeys(run_id).refusals, field, data)

    try:
        await patiently(
            write, what="writing why this replica cannot serve", timeout_s=_PATIENCE_S, waits_for_room=False
        )
    except (UnavailableError, RedisError) as error:  # full memory or disk, read-only: must not hide the reason itself
        log.warning("the reason why this replica cannot serve could not be written: %s", error)


async def take_back(redis: Redis, kind: Kind, replica_id: str, *, run_id: str | None) -> None:
    """Delete this replica's stored reason, because it serves now.

    Raises:
        UnavailableError: Redis did not answer.
    """
    key = REFUSALS if run_id is None else RunKeys(run_id).refusals
    field = _field(kind, replica_id)
    await patiently(lambda: redis.hdel(key, field), what="forgetting a refusal", timeout_s=60.0)


def decode_refusals(*hashes: Mapping[Any, bytes | str]) -> list[Refusal]:
    """Return the refusals in the hashes, oldest first. If several hashes have one replica's, the last hash wins."""
    found: dict[str | bytes, Refusal] = {}
    for entries in hashes:
        for field, data in entries.items():
            try:
                found[field] = msgspec.json.decode(data, type=Refusal)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                log.warning("a refusal of %r cannot be read", field[:100])
    return sorted(found.values(), key=lambda refusal: refusal.at_s)


def _field(kind: Kind, replica_id: str) -> str:
    return f"{kind}/{replica_id}"
