"""The client that trickles bytes returns a whole response, however slowly that comes."""

import asyncio

from tests.http.raw_client import RawClient


async def test_a_response_that_takes_longer_than_the_pause_between_bytes_is_read_whole() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 408 ")
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.write(b"Request Timeout")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with RawClient.to(port) as client:
            assert await client.trickle(b"xxxx", every_s=0.05) == b"HTTP/1.1 408 Request Timeout"
