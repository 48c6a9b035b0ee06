"""Reads streams for assertions in tests."""

from typing import Any

from shared.redis.redis_connection import Redis


async def entries(redis: Redis, stream: str) -> list[tuple[str, dict[str, bytes]]]:
    """Return (entry id, fields) of all entries of a stream."""
    found: Any = await redis.xrange(stream)
    return [(entry_id.decode(), {name.decode(): value for name, value in fields.items()}) for entry_id, fields in found]
