"""A service's socket: bound or a sentence, and its answers wait for nobody's acknowledgement."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from shared.errors import UserError
from shared.listening import bound_socket


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with bound_socket("127.0.0.1", 0) as bound:
        yield bound


async def test_an_accepted_connection_sends_at_once_what_is_written(bound: socket.socket) -> None:
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(look, sock=bound):
        _, writer = await asyncio.open_connection(*bound.getsockname())
        assert await asyncio.wait_for(accepted, 10)
        writer.close()


def test_a_taken_port_is_said(bound: socket.socket) -> None:
    bound.listen()
    port = bound.getsockname()[1]
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use. Stop what is"):
        bound_socket("127.0.0.1", port)


def test_an_address_of_ipv6_is_one() -> None:
    if not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    with bound_socket("::1", 0) as bound:
        assert bound.family == socket.AF_INET6
