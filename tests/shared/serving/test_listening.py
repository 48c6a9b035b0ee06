"""A service's socket: it listens or the service reports why not, and responses do not wait for acknowledgements."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from shared.errors import UserError
from shared.serving.listening import listening_socket

pytestmark = pytest.mark.unit


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listening_socket("127.0.0.1", 0) as listener:
        yield listener


async def test_an_accepted_connection_sends_at_once_what_is_written(listener: socket.socket) -> None:
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(look, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(accepted, 120)
        writer.close()


def test_a_taken_port_is_reported(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use. Stop what is"):
        listening_socket("127.0.0.1", port)


def test_an_address_of_ipv6_is_one() -> None:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as plain:
            plain.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listening_socket("::1", 0) as listener:
        assert listener.family == socket.AF_INET6
