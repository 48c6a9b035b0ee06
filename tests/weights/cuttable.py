"""A network between a trainer and one replica that a test can cut: packets are lost, and no connection ends.

    trainer --HTTP--> [door] --> replica            the replica is registered with the address of the door
    trainer <-- store, lifeline, gloo pairs --[doors]-- replica

The HTTP door replaces the port in a join body by that of a door to the trainer's store. The store's traffic contains
the addresses (sockaddr_in) at which gloo's pairs listen, which are replaced by doors too. Of two ends, gloo lets the
one with the smaller port listen, and compares ports in network byte order as if they were numbers: the low byte counts
first. So that both ends agree, a door has its port's low byte and a high byte as close as possible.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Coroutine
from typing import Any

Rewrite = Callable[[bytes], bytes]
_LOOPBACK = "127.0.0.1"
_MASTER_PORT = re.compile(rb'"master_port":(\d+)')
_SOCKADDR = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01\x00{8}", re.DOTALL)


class CuttableNetwork:
    """The network between the trainer and the replica at ``url``; the trainer has to use ``self.url``."""

    def __init__(self, url: str) -> None:
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._servers: list[asyncio.Server] = []
        self._doors: dict[int, int] = {}
        self._inside: set[int] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._passing: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        port = self._door_to(int(url.rpartition(":")[2]), self._with_store_doors)
        self.url = f"http://{_LOOPBACK}:{port}"

    @property
    def is_joining(self) -> bool:
        """Whether a join has passed."""
        return len(self._doors) > 1

    def cut(self) -> None:
        """From now on, nothing arrives and no connection ends."""
        self._flowing.clear()

    def heal(self) -> None:
        """Let new connections pass. The old ones are lost."""
        for writer in list(self._writers):
            writer.transport.abort()
        self._flowing.set()

    async def close(self) -> None:
        """End all of it."""
        self._is_closed = True
        for server in self._servers:
            server.close()
        self.heal()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._passing, return_exceptions=True)

    def _door_to(self, port: int, rewrite: Rewrite) -> int:
        if port in self._inside:
            return port  # a door already, seen from the other side
        if port not in self._doors:
            door = _listener_near(port)
            self._doors[port] = door.getsockname()[1]
            self._inside.add(self._doors[port])
            self._spawn(self._serve(door, port, rewrite))
        return self._doors[port]

    def _with_store_doors(self, data: bytes) -> bytes:
        def replaced(match: re.Match[bytes]) -> bytes:
            door = self._door_to(int(match[1]), self._with_pair_doors)
            assert len(str(door)) == len(match[1]), "the body would have another length"
            return b'"master_port":%d' % door

        return _MASTER_PORT.sub(replaced, data)

    def _with_pair_doors(self, data: bytes) -> bytes:
        def replaced(match: re.Match[bytes]) -> bytes:
            door = self._door_to(int.from_bytes(match[1], "big"), _as_it_is)
            return match[0].replace(match[1], door.to_bytes(2, "big"), 1)

        return _SOCKADDR.sub(replaced, data)

    async def _serve(self, door: socket.socket, port: int, rewrite: Rewrite) -> None:
        async def pass_through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            here = asyncio.current_task()
            assert here is not None
            self._passing.add(here)
            self._writers.add(writer)
            try:
                await self._flowing.wait()
                if not self._is_closed:
                    await self._join(reader, writer, port, rewrite)
            finally:
                writer.transport.abort()
                self._writers.discard(writer)
                self._passing.discard(here)

        server = await asyncio.start_server(pass_through, sock=door)
        self._servers.append(server)
        await server.serve_forever()

    async def _join(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, rewrite: Rewrite
    ) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(_LOOPBACK, port)
        except OSError:
            return
        self._writers.add(far_writer)
        try:
            await asyncio.gather(self._pump(reader, far_writer, rewrite), self._pump(far_reader, writer, rewrite))
        finally:
            far_writer.transport.abort()
            self._writers.discard(far_writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rewrite: Rewrite) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._flowing.wait()
                writer.write(rewrite(data))
                await writer.drain()
            await self._flowing.wait()
        writer.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(work, name="a door"))


def _as_it_is(data: bytes) -> bytes:
    return data


def _listener_near(port: int) -> socket.socket:
    candidates = sorted(range(port % 256 + 1024, 1 << 16, 256), key=lambda candidate: abs(candidate - port))
    for candidate in candidates:
        listener = socket.socket()
        try:
            listener.bind((_LOOPBACK, candidate))
        except OSError:
            listener.close()
            continue
        listener.listen(64)
        return listener
    raise AssertionError(f"no port with the low byte of {port} is free")
