"""A real HTTP server on loopback that misbehaves as reward endpoints may, in a different way on each path.

server.on("/judge", busy(retry_after="1"), answers({"rewards": [1.0]}))     the first once, then the second for ever
"""

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

CHUNK = b" " * 65536


@dataclass(frozen=True)
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> object:
        """Return the parsed body."""
        return json.loads(self.body)


Behaviour = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class MisbehavingServer:
    """Records the requests, and answers them as configured."""

    port: int = 0
    received: list[Received] = field(default_factory=list[Received])
    num_bytes_sent: int = 0
    num_connections: int = 0
    num_open: int = 0
    greeting: bytes = b""
    """Sent to every client when it connects."""
    _beside: "set[asyncio.Task[None]]" = field(default_factory=set["asyncio.Task[None]"])
    _behaviours: dict[str, list[Behaviour]] = field(default_factory=dict[str, list[Behaviour]])

    def on(self, path: str, *behaviours: Behaviour) -> str:
        """Set the behaviours at ``path``, one per request; the last one repeats. Return the URL."""
        self._behaviours[path] = list(behaviours)
        return f"http://127.0.0.1:{self.port}{path}"

    def received_at(self, path: str) -> list[Received]:
        """Return the requests to one path."""
        return [request for request in self.received if request.path == path]

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something while the connection of a request goes on."""
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        self.num_connections += 1
        self.num_open += 1
        try:
            writer.write(self.greeting)
            await self._answer(reader, writer)
        finally:
            self.num_open -= 1

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                request = await _read(reader)
                self.received.append(request)
                behaviours = self._behaviours[request.path]
                behaviour = behaviours.pop(0) if len(behaviours) > 1 else behaviours[0]
                await behaviour(request, writer)
                if writer.is_closing():
                    return


async def _read(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(first.split(" ")[1], headers, body)


@contextlib.asynccontextmanager
async def misbehaving_server() -> AsyncGenerator[MisbehavingServer]:
    """Serve on a free port of 127.0.0.1, and end everything afterwards."""
    server, tasks = MisbehavingServer(), set[asyncio.Task[None]]()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await server.serve(reader, writer)
        except asyncio.CancelledError:  # the test is over
            pass
        finally:
            tasks.discard(task)
            writer.transport.abort()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listener.wait_closed()


def answers(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Behaviour:
    """Answer with ``body``: bytes unchanged, anything else as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def behave(_request: Received, writer: asyncio.StreamWriter) -> None:
        fields = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"HTTP/1.1 {status} Whatever\r\n{lines}\r\n".encode() + data)
        await writer.drain()

    return behave


def sends(data: bytes) -> Behaviour:
    """Send these bytes, which need not be HTTP, and keep the connection."""

    async def behave(_request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return behave


def echoes() -> Behaviour:
    """Answer with the headers of the request, in the place where a TRL answer would be."""

    async def behave(request: Received, writer: asyncio.StreamWriter) -> None:
        await answers({"seen": request.headers}, headers={"X-Seen": request.headers.get("authorization", "")})(
            request, writer
        )

    return behave


async def hangs(_request: Received, _writer: asyncio.StreamWriter) -> None:
    """Never answer."""
    await asyncio.Event().wait()


async def drips(_request: Received, writer: asyncio.StreamWriter) -> None:
    """Begin an answer, and send the rest one byte at a time, slowly."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n[")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def sends_crumbs(_request: Received, writer: asyncio.StreamWriter) -> None:
    """Answer in chunks of one byte."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(100):
        writer.write(b"1\r\n \r\n" * 1000)
        await writer.drain()
    writer.write(b"8\r\n[1.0, 2]\r\n0\r\n\r\n")


async def continues_for_ever(_request: Received, writer: asyncio.StreamWriter) -> None:
    """Send "100 Continue" again and again."""
    while True:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)
        await writer.drain()


async def closes(_request: Received, writer: asyncio.StreamWriter) -> None:
    """Close the connection without an answer."""
    writer.close()


async def closes_mid_body(_request: Received, writer: asyncio.StreamWriter) -> None:
    """Announce a longer body than it sends."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n[1.0, ")
    await writer.drain()
    writer.close()


async def talks_nonsense(_request: Received, writer: asyncio.StreamWriter) -> None:
    """Answer with bytes that are not HTTP."""
    writer.write(b"220 smtp.example.com ESMTP\r\n" * 3)
    await writer.drain()
    writer.close()


def sends_plain(server: MisbehavingServer, num_bytes: int, *, is_length_known: bool = True) -> Behaviour:
    """Answer with a huge body, as fast as the client reads it."""
    length = f"Content-Length: {num_bytes}\r\n" if is_length_known else "Connection: close\r\n"

    async def behave(_request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\n{length}\r\n".encode())
        for _ in range(num_bytes // len(CHUNK)):
            writer.write(CHUNK)
            await writer.drain()
            server.num_bytes_sent += len(CHUNK)

    return behave


def gzip_bomb(num_bytes: int) -> Behaviour:
    """Answer with few bytes that decompress to ``num_bytes``, whether or not the client accepts gzip."""
    member = gzip.compress(b"[" + b" " * 5_999_999)
    return answers(member * (num_bytes // 6_000_000), headers={"Content-Encoding": "gzip"})
