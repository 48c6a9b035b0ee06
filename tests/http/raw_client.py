"""A client that can send any bytes, and notices when the server closes the connection."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncGenerator
from typing import Any, Self

_HEAD = "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}\r\n"


def head(path: str, *more: str) -> bytes:
    """Return the head of a POST request with additional headers."""
    return _HEAD.format(path=path, more="".join(f"{line}\r\n" for line in more)).encode()


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, port: int, *, address: str = "127.0.0.1") -> AsyncGenerator[Self]:
        """Connect from a given loopback address, and close the connection at the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        try:
            yield cls(reader, writer)
        finally:
            writer.transport.abort()

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        self._writer.write(data)
        await self._writer.drain()

    def reset(self) -> None:
        """Close the connection at once, so that the server gets an error when it sends."""
        connection = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
        self._writer.transport.abort()

    async def send_for_ever(self) -> None:
        """Send until the server closes the connection."""
        async with asyncio.timeout(120):
            while True:
                await self.send(b"x" * 1000)
                await asyncio.sleep(0)

    async def trickle(self, data: bytes, *, every_s: float = 0.05) -> bytes:
        """Send one byte at a time until a response comes or the server closes the connection; return what it sent."""
        for at in range(len(data)):
            with contextlib.suppress(ConnectionError):
                await self.send(data[at : at + 1])
            begun: bytes | None = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):  # only for the first byte: a response that is cut off here is lost
                    begun = await self._reader.read(1)
            if begun is not None:
                return await self.until_closed(begun)
        raise AssertionError("all was sent, and nothing came back")

    async def some(self, *, within_s: float) -> bytes:
        """Return the next bytes from the server; empty if it sends nothing for this long, or closes the connection."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(within_s):
                return await self._reader.read(65536)
        return b""

    async def until_closed(self, begun: bytes = b"") -> bytes:
        """Return everything that the server sends until it closes the connection."""
        async with asyncio.timeout(120):
            with contextlib.suppress(ConnectionError):
                while data := await self._reader.read(65536):
                    begun += data
        return begun

    async def answer(self) -> tuple[int, Any]:
        """Return status and body of one response. The connection may stay open."""
        async with asyncio.timeout(120):
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
            body = await self._reader.readexactly(int(headers["content-length"]))
        return int(lines[0].split()[1]), json.loads(body)


def parsed(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Return status and problem of a response."""
    start, _, body = answer.partition(b"\r\n\r\n")
    return int(start.split()[1]), json.loads(body)
