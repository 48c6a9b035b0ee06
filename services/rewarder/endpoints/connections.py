"""Keeps connections to reward endpoints for the next request, and closes those that nobody needs any more.

    request --> an idle connection to that origin, or a new one --> answer read to its end --> idle again
                                                                +-> anything else           --> closed

httpcore has a pool, too, but each of its requests looks at every connection, and at every other one for each that is
idle: with 300 requests at a time it kept the event loop busy for seconds. Here each of them is looked at once. How many
there are is not limited here: endpoints have a limit each.
"""

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncGenerator

import httpcore

_MAX_IDLE = 64
"""Of one origin."""
_KEEP_IDLE_S = 30.0
_SWEEP_EVERY_S = 10.0

Origin = tuple[bytes, bytes, int | None]


class Connections:
    """The connections to all origins.

    Args:
        network: Opens them.
        ssl_context: Checks certificates.
    """

    def __init__(self, network: httpcore.AsyncNetworkBackend, *, ssl_context: ssl.SSLContext) -> None:
        self._network = network
        self._ssl_context = ssl_context
        self._idle: dict[Origin, deque[httpcore.AsyncHTTPConnection]] = {}
        self._in_use: set[httpcore.AsyncHTTPConnection] = set()
        self._sweeping: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def send(self, request: httpcore.Request) -> AsyncGenerator[httpcore.Response]:
        """Send, and yield the answer, of which the body is still to be read.

        Raises:
            httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException: As they happen.
        """
        origin = (request.url.scheme, request.url.host, request.url.port)
        connection = await self._take(origin, request)
        self._in_use.add(connection)
        try:
            response = await connection.handle_async_request(request)
            try:
                yield response
            finally:
                await response.aclose()
        finally:
            self._in_use.discard(connection)
            await self._give_back(origin, connection)

    async def aclose(self) -> None:
        """Close all of them; whoever still waits for an answer gets an error."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        connections = [*self._in_use, *(connection for idle in self._idle.values() for connection in idle)]
        self._idle.clear()
        for connection in connections:
            await connection.aclose()

    async def sweep(self) -> None:
        """Close what has been idle for long, or was closed by the other side, also of endpoints no longer called."""
        expired: list[httpcore.AsyncHTTPConnection] = []
        for origin, idle in list(self._idle.items()):
            gone = [connection for connection in idle if connection.has_expired()]
            for connection in gone:
                idle.remove(connection)
            if not idle:
                del self._idle[origin]
            expired += gone
        for connection in expired:
            await connection.aclose()

    async def _take(self, origin: Origin, request: httpcore.Request) -> httpcore.AsyncHTTPConnection:
        while idle := self._idle.get(origin):  # looked up again each time: others take and sweep while one is closed
            connection = idle.pop()  # the one used last is the likeliest to be still open
            if connection.is_available() and not connection.has_expired():
                return connection
            await connection.aclose()
        return httpcore.AsyncHTTPConnection(
            request.url.origin,
            ssl_context=self._ssl_context,
            keepalive_expiry=_KEEP_IDLE_S,
            network_backend=self._network,
        )

    async def _give_back(self, origin: Origin, connection: httpcore.AsyncHTTPConnection) -> None:
        num_idle = len(self._idle.get(origin, ()))
        if not connection.is_idle() or not connection.is_available() or num_idle >= _MAX_IDLE:
            await connection.aclose()
            return
        self._idle.setdefault(origin, deque()).append(connection)
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.create_task(self._keep_sweeping(), name="close idle connections")

    async def _keep_sweeping(self) -> None:
        """Sweep now and then until nothing is left, also when no more requests come."""
        while self._idle:
            await asyncio.sleep(_SWEEP_EVERY_S)
            await self.sweep()
