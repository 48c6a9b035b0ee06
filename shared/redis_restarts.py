"""Notices that Redis was started again, or another server took its place: what it acknowledged last may be gone.

A server that is killed may have acknowledged, a moment before, what it had not yet written to its file. Then entries
are back that were handed off, and others are gone that were admitted.
"""

import time

from shared.redis_connection import Redis, patiently

_EVERY_S = 5.0


class RestartWatch:
    """Asks a server now and then which process it is.

    Args:
        redis: Client of redis_connection.py.
        every_s: How often to ask.
    """

    def __init__(self, redis: Redis, *, every_s: float = _EVERY_S) -> None:
        self._redis = redis
        self._every_s = every_s
        self._server: str | None = None
        self._look_at = 0.0

    async def has_restarted(self) -> bool:
        """Return whether the server is another process than when this was last asked; False the first time.

        Raises:
            UnavailableError: It does not answer for a minute.
        """
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + self._every_s
        info = await patiently(lambda: self._redis.info("server"), what="Redis INFO", timeout_s=60)
        before, self._server = self._server, str(info["run_id"])
        return before not in (None, self._server)
