"""Accepts connections, and limits their number by closing idle ones instead of refusing new ones.

    listening socket --> [open: <= max_connections] --> uvicorn's protocol
                              |
                              one more: the oldest idle connection of the peer with the most is closed

The peer with the most connections loses one. So a client with a thousand idle connections displaces no other client,
and a probe gets in. If that peer has no idle connection, another peer loses one. A new connection is refused only if
every open one has a request under way, which is rare, as ``max_requests`` is below ``max_connections``. asyncio's own
server has no such limit; when file descriptors run out, it retries without a pause and logs a stack trace each time.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from shared.serving.http_connection import BUFFER_BYTES, Connection
from shared.serving.http_limits import HttpLimits
from shared.serving.listening import BACKLOG

log = logging.getLogger(__name__)

_ACCEPTED_AT_ONCE = 64
_RETRY_S = 0.5
_LOG_EVERY_S = 60.0


class Acceptor:
    """Accepts and limits the connections of one listening socket. Has the interface that uvicorn expects of a server.

    Args:
        listener: A bound socket, which the caller closes.
        make_protocol: Makes uvicorn's protocol for a connection.
        limits: The most connections, and their deadlines.
        tls: Context with certificates; None serves plain HTTP.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        make_protocol: Callable[[], H11Protocol],
        limits: HttpLimits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._limits = limits
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(BUFFER_BYTES)
        self._of_peer: dict[str, dict[Connection, None]] = {}
        """Connections by peer, the longest idle first."""
        self._num_connections = 0
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._logged_at: dict[str, float] = {}
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def enforce_deadlines(self) -> None:
        """Close connections whose client missed a deadline; called twice a second."""
        now = self._loop.time()
        for connections in list(self._of_peer.values()):
            for connection in list(connections):
                connection.enforce_deadlines(now)

    def close(self) -> None:
        """Stop accepting connections. Connections with a request under way stay open."""
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
        for task in self._opening:
            task.cancel()
        for connections in list(self._of_peer.values()):
            for connection in list(connections):
                connection.stop_lingering()

    async def wait_closed(self) -> None:
        """Do nothing, because uvicorn has already waited for the connections."""

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptor or no memory is left
                self._log("descriptors", "cannot accept a connection: %s; the oldest idle ones are closed", error)
                if not self._make_room():
                    self._loop.remove_reader(self._listener)
                    self._retry = self._loop.call_later(_RETRY_S, self._accept_again)
                return
            if self._num_connections >= self._limits.max_connections and not self._make_room():
                self._log(
                    "full", "%d connections have a request under way, and more are turned away", self._num_connections
                )
                accepted.close()
                continue
            self._open(accepted, peer=str(address[0]) if address else "")

    def _accept_again(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener, self._accept)

    def _open(self, accepted: socket.socket, *, peer: str) -> None:
        accepted.setblocking(False)
        connection = Connection(
            self._make_protocol(),
            peer=peer,
            limits=self._limits,
            buffer=self._buffer,
            on_request=self._now_newest,
            on_end=self._forget,
        )
        self._of_peer.setdefault(peer, {})[connection] = None
        self._num_connections += 1
        task = self._loop.create_task(self._begin(accepted, connection), name="open a connection")
        connection.opened_by(task)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _begin(self, accepted: socket.socket, connection: Connection) -> None:
        handshake_timeout_s = None if self._tls is None else self._limits.head_timeout_s
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=handshake_timeout_s
            )
        except OSError as error:  # errors of the handshake, such as ssl.SSLError and TimeoutError
            log.debug("a connection of %s did not open: %s", connection.peer, error)
            self._forget(connection)
            accepted.close()
        except asyncio.CancelledError:
            self._forget(connection)
            accepted.close()
            raise

    def _make_room(self) -> bool:
        """Close the longest idle connection of the peer with the most; return False if no connection is idle."""
        most = max(self._of_peer, key=lambda peer: len(self._of_peer[peer]), default="")
        victim = _oldest_idle(self._of_peer.get(most, {}))
        if victim is None:
            victim = next(filter(None, map(_oldest_idle, self._of_peer.values())), None)
        if victim is None:
            return False
        self._log(
            "room",
            "%d connections are open, %d of them by %s, whose oldest idle ones are closed (HEADRACE_MAX_CONNECTIONS)",
            self._num_connections,
            len(self._of_peer[victim.peer]),
            victim.peer,
        )
        self._forget(victim)
        victim.abort()
        return True

    def _now_newest(self, connection: Connection) -> None:
        connections = self._of_peer.get(connection.peer, {})
        if connection in connections:
            del connections[connection]
            connections[connection] = None

    def _forget(self, connection: Connection) -> None:
        connections = self._of_peer.get(connection.peer, {})
        if connection not in connections:
            return
        del connections[connection]
        self._num_connections -= 1
        if not connections:
            del self._of_peer[connection.peer]

    def _log(self, kind: str, text: str, *arguments: Any) -> None:
        """Log a message that every connection could cause, at most once a minute."""
        now = self._loop.time()
        if now - self._logged_at.get(kind, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._logged_at[kind] = now
            log.warning(text, *arguments)


def _oldest_idle(connections: dict[Connection, None]) -> Connection | None:
    return next((connection for connection in connections if not connection.is_answering), None)
