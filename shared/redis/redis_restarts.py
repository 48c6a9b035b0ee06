"""Detects that Redis was restarted or replaced by another server: the last writes it acknowledged may be lost.

A server that is killed may have acknowledged writes that were not yet in its file. Then entries that were handed off
are back, and entries that were admitted are gone.
"""

import time

from shared.redis.redis_connection import Redis, patiently

_EVERY_S = 5.0


class RestartWatch:
    """Notices restarts of a Redis server by the ``run_id`` that INFO reports.

    Args:
        redis: Client of redis_connection.py.
        every_s: Shortest time between two requests, in seconds.
    """

    def __init__(self, redis: Redis, *, every_s: float = _EVERY_S) -> None:
        self._redis = redis
        self._every_s = every_s
        self._server: str | None = None
        self._look_at = 0.0

    async def has_restarted(self) -> bool:
        """Return whether the server is another process than at the last request; False at the first.

        Returns False without a request if the last one was less than ``every_s`` ago.

        Raises:
            UnavailableError: The server does not answer for a minute.
        """
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + self._every_s
        info = await patiently(lambda: self._redis.info("server"), what="Redis INFO", timeout_s=60)
        before, self._server = self._server, str(info["run_id"])
        return before not in (None, self._server)
