"""One client's connection to a service: adds deadlines for the client to uvicorn's protocol, which has none.

    accepted --head_timeout_s--> head --> body --> answer --keep_alive_s--> next head ...
                 408                  http_guard.py      |
                                                         +-- client reads nothing for send_timeout_s: cut off

An answer that comes before the client has sent everything ends the connection, but not at once: a client that is still
sending when its connection closes never reads the answer. For a few seconds its data is discarded without parsing.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from shared.serving.http_guard import problem
from shared.serving.http_limits import HttpLimits

log = logging.getLogger(__name__)

_LINGER_S = 5.0
_MAX_DISCARDED_BYTES = 64 * 1024 * 1024
BUFFER_BYTES = 16 * 1024
"""How much of a connection is read before others have their turn. In chunks of one byte each, h11 takes 17 ms for this
much, and 280 ms for asyncio's own 256 KiB."""


class Http(H11Protocol):
    """uvicorn's HTTP protocol, except that it answers malformed requests with problem+json."""

    def send_400_response(self, msg: str) -> None:
        """Answer unreadable input with 400, and close the connection: the next request's start cannot be found."""
        cycle = cast("Any", self).cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            detail = "This is not a request in HTTP/1.1, its head is too long, or it could be read in two ways."
            self.transport.write(_last_answer(HTTPStatus.BAD_REQUEST, problem(400, "Malformed request", detail)))
        self.transport.close()


class Connection(asyncio.BufferedProtocol):
    """Passes a client's data to uvicorn's protocol, and limits the time that the client takes.

    Args:
        http: uvicorn's protocol for this connection.
        peer: The client's address.
        limits: Deadlines for the client.
        buffer: Buffer to read into. All connections of an event loop share it: each reads and passes on in one step.
        on_request: Called when the head of a request is complete.
        on_end: Called when the connection is gone.
    """

    def __init__(
        self,
        http: H11Protocol,
        *,
        peer: str,
        limits: HttpLimits,
        buffer: bytearray,
        on_request: "Callable[[Connection], None]",
        on_end: "Callable[[Connection], None]",
    ) -> None:
        self.peer = peer
        self._http = http
        self._limits = limits
        self._buffer = buffer
        self._on_request = on_request
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._opening: asyncio.Task[None] | None = None
        self._cycle: object = None
        self._head_due_at: float | None = None
        self._has_part_of_a_head = False
        self._may_linger = True
        self._lingers_until: float | None = None
        self._num_discarded_bytes = 0
        self._num_unsent_bytes = 0
        self._taken_at = 0.0

    @property
    def is_answering(self) -> bool:
        """Whether a request was received and is not answered yet."""
        cycle = cast("Any", self._http).cycle
        return cycle is not None and not cycle.response_complete

    @property
    def is_lingering(self) -> bool:
        """Whether the last answer was sent and the connection only waits until the client stops sending."""
        return self._lingers_until is not None

    def opened_by(self, task: "asyncio.Task[None]") -> None:
        """Set the task that opens the connection, which ``abort`` cancels."""
        self._opening = task

    def stop_lingering(self) -> None:
        """Do not wait any more for clients that are still sending, because the server stops."""
        self._may_linger = False
        if self.is_lingering:
            self.abort()

    def abort(self) -> None:
        """Close the connection at once, even while a request is answered."""
        if self._transport is not None:
            self._transport.abort()
        elif self._opening is not None:
            self._opening.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the deadline of the first request's head, and connect uvicorn's protocol."""
        self._transport = cast("asyncio.Transport", transport)
        self._taken_at = _now()
        self._head_due_at = self._taken_at + self._limits.head_timeout_s
        self._http.connection_made(_LingeringTransport(self._transport, self.end))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the shared read buffer, as a memoryview: asyncio slices it, and a bytearray's slices are copies."""
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        """Pass ``nbytes`` received bytes to uvicorn's protocol, or discard them if the last answer was sent."""
        if self.is_lingering:
            self._num_discarded_bytes += nbytes
            if self._num_discarded_bytes > _MAX_DISCARDED_BYTES:
                self.abort()
            return
        self._has_part_of_a_head = self._has_part_of_a_head or not self.is_answering
        self._http.data_received(bytes(self._buffer[:nbytes]))
        cycle = cast("Any", self._http).cycle
        if cycle is not self._cycle:
            self._cycle = cycle
            self._head_due_at, self._has_part_of_a_head = None, False
            self._on_request(self)
        elif self._has_part_of_a_head and self._head_due_at is None:
            self._head_due_at = _now() + self._limits.head_timeout_s

    def eof_received(self) -> None:
        """Tell uvicorn's protocol that the client sends no more. asyncio then closes the connection."""
        self._http.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection to uvicorn's protocol and to ``on_end``."""
        self._http.connection_lost(exc)
        self._on_end(self)

    def pause_writing(self) -> None:
        """Have uvicorn's protocol stop writing, because the client reads too slowly."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Have uvicorn's protocol go on writing, because the client has read enough."""
        self._http.resume_writing()

    def end(self) -> None:
        """Close the connection once everything is sent and the client has stopped sending, or after a few seconds."""
        transport = self._transport
        if transport is None or transport.is_closing() or self.is_lingering:
            return
        cycle = cast("Any", self._http).cycle
        still_sends = self._has_part_of_a_head or (cycle is not None and cycle.more_body)
        if not still_sends or not self._may_linger:
            transport.close()
            return
        self._lingers_until = _now() + _LINGER_S
        self._head_due_at = None
        transport.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()

    def enforce_deadlines(self, now: float) -> None:
        """Close the connection if the client missed a deadline; ``now`` is the event loop's time, in seconds."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        num_unsent_bytes = transport.get_write_buffer_size()
        if num_unsent_bytes < self._num_unsent_bytes or num_unsent_bytes == 0:
            self._taken_at = now
        self._num_unsent_bytes = num_unsent_bytes
        if now - self._taken_at >= self._limits.send_timeout_s or now >= (self._lingers_until or now + 1):
            transport.abort()
        elif self._head_due_at is not None and now >= self._head_due_at:
            self._head_due_at = None
            if self._has_part_of_a_head:
                transport.write(_head_too_slow(self._limits.head_timeout_s))
            self.end()


class _LingeringTransport(asyncio.Transport):
    """The transport that uvicorn's protocol writes to. Its ``close`` ends the connection with ``Connection.end``."""

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        super().__init__()
        self._transport = transport
        self._end = end
        self._is_closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        # asyncio would log a warning for each write to a connection that the client has closed.
        if not self.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        self._is_closing = True
        self._end()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def pause_reading(self) -> None:
        if not self.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_closing():
            self._transport.resume_reading()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _head_too_slow(timeout_s: float) -> bytes:
    detail = f"The head of the request did not arrive within {timeout_s:g} s."
    return _last_answer(HTTPStatus.REQUEST_TIMEOUT, problem(408, "Request too slow", detail))


def _last_answer(status: HTTPStatus, content: dict[str, Any]) -> bytes:
    """Return the answer to a request that was not read, and log it: access/request_log.py does not see it."""
    request_id = secrets.token_hex(8)
    log.info("[%s] answered %d: %s", request_id, status, content["title"])
    body = json.dumps({**content, "request_id": request_id}).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/problem+json\r\n"
        f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
