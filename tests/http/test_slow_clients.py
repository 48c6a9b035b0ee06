"""A slow, silent or endless client loses its connection, in such a way that it can read the reason."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from shared.serving.http_guard import App, HttpGuard, Receive, Scope, Send
from shared.serving.http_limits import HttpLimits
from shared.serving.http_server import HttpServer
from shared.serving.listening import listening_socket
from tests.eventually import eventually
from tests.http.raw_client import RawClient, head, parsed

SHORT = HttpLimits(
    head_timeout_s=0.5, body_timeout_s=0.5, send_timeout_s=0.5, keep_alive_s=1, max_connections=8, max_requests=4
)
FEW = HttpLimits(max_connections=SHORT.max_connections, max_requests=SHORT.max_requests)
"""With time enough on a busy machine."""
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Application:
    """The path decides the response; ``/waits`` waits until the test releases it."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.go = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/reads":
            while (message := await receive()).get("more_body"):
                pass
            if message["type"] == "http.disconnect":
                return
        if scope["path"] == "/waits":
            self.num_waiting += 1
            await self.go.wait()
        body = b'"' + b"x" * (32 * 1024 * 1024) + b'"' if scope["path"] == "/large" else b'"ok"'
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(app: App, limits: HttpLimits) -> AsyncGenerator[tuple[HttpServer, int]]:
    """Serve on a free port."""
    with listening_socket("127.0.0.1", 0) as listener:
        server = HttpServer(HttpGuard(app, limits), limits, drain_s=1)
        task = asyncio.create_task(server.serve(sockets=[listener]), name="server under test")
        await eventually(lambda: server.started)
        try:
            yield server, listener.getsockname()[1]
        finally:
            server.should_exit = True
            async with asyncio.timeout(120):
                await task


@pytest.fixture
async def app() -> Application:
    return Application()


@pytest.fixture
async def port(app: Application) -> AsyncIterator[int]:
    async with serving(app, SHORT) as (_, port):
        yield port


async def test_a_connection_without_a_byte_is_closed_without_a_word(port: int) -> None:
    async with RawClient.to(port) as client:
        assert await client.until_closed() == b""


@pytest.mark.parametrize("num_requests_before", [0, 1])
async def test_a_head_that_does_not_end_is_a_408(port: int, num_requests_before: int) -> None:
    async with RawClient.to(port) as client:
        for _ in range(num_requests_before):
            await client.send(GET)
            assert await client.answer() == (200, "ok")
        status, problem = parsed(await client.trickle(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 10_000))
    assert status == 408
    assert problem["detail"] == "The head of the request did not arrive within 0.5 s."


@pytest.mark.parametrize("framing", ["Content-Length: 9999", "Transfer-Encoding: chunked"])
async def test_a_body_that_does_not_end_is_a_408(port: int, framing: str) -> None:
    async with RawClient.to(port) as client:
        await client.send(head("/reads", framing))
        data = b"1\r\nx\r\n" * 1000 if "chunked" in framing else b"x" * 9998
        status, problem = parsed(await client.trickle(data))
    assert (status, problem["title"]) == (408, "Body too slow")


async def test_an_idle_connection_is_kept_for_a_while_and_then_closed(port: int) -> None:
    async with RawClient.to(port) as client:
        for _ in range(2):
            await client.send(GET)
            assert await client.answer() == (200, "ok")
        assert await client.until_closed() == b""


async def test_a_client_that_does_not_read_the_answer_is_cut_off(app: Application) -> None:
    async with serving(app, SHORT) as (server, port), RawClient.to(port) as client:
        await client.send(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: len(server.server_state.connections) == 1)
        await eventually(lambda: len(server.server_state.connections) == 0)
        assert len(await client.until_closed()) < 32 * 1024 * 1024


async def test_a_client_that_sends_its_whole_body_first_reads_an_early_answer(port: int) -> None:
    async with RawClient.to(port) as client:
        await client.send(head("/refuses", "Content-Length: 4000000"))
        await client.send(b"x" * 4_000_000)
        assert parsed(await client.until_closed())[0] == 200


async def test_a_client_that_never_stops_sending_after_the_answer_is_cut_off(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.serving.http_connection._LINGER_S", 0.5)
    async with RawClient.to(port) as client:
        await client.send(head("/refuses", "Content-Length: 99999999"))
        with pytest.raises(ConnectionError):
            await client.send_for_ever()


async def test_one_connection_too_many_closes_the_oldest_idle_connection_of_the_client_with_most(
    app: Application,
) -> None:
    async with serving(app, FEW) as (_, port), contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(RawClient.to(port, address="127.0.0.2"))
        await other.send(GET)
        assert await other.answer() == (200, "ok")
        busy = await stack.enter_async_context(RawClient.to(port))
        await busy.send(b"GET /waits HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: app.num_waiting == 1)
        greedy = [await stack.enter_async_context(RawClient.to(port)) for _ in range(6)]
        newest = await stack.enter_async_context(RawClient.to(port))
        await newest.send(GET)
        assert await newest.answer() == (200, "ok")
        assert await greedy[0].until_closed() == b""
        await other.send(GET)
        assert await other.answer() == (200, "ok"), "an open connection stays open"
        app.go.set()
        assert await busy.answer() == (200, "ok"), "a running request is not aborted"


async def test_requests_leave_connections_for_a_probe(app: Application) -> None:
    async with serving(app, FEW) as (_, port), contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RawClient.to(port)) for _ in range(8)]
        for client in clients:
            await client.send(b"GET /waits HTTP/1.1\r\nHost: x\r\n\r\n")
        told = [(await client.answer())[0] for client in clients[FEW.max_requests :]]
        assert told == [503] * 4
        assert app.num_waiting == FEW.max_requests
        async with RawClient.to(port) as probe:
            await probe.send(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await probe.answer() == (200, "ok")
        app.go.set()


async def test_a_server_that_stops_does_not_wait_for_a_client_that_still_sends(app: Application) -> None:
    async with serving(app, HttpLimits()) as (server, port), RawClient.to(port) as client:
        await client.send(head("/refuses", "Content-Length: 4000000"))
        await eventually(lambda: server.server_state.total_requests == 1)
        server.should_exit = True
        await client.until_closed()


async def test_a_client_that_hangs_up_in_the_middle_of_many_pieces_costs_no_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    go, is_written = asyncio.Event(), asyncio.Event()

    async def many_pieces(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await go.wait()
        for _ in range(200):
            await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        is_written.set()

    async with serving(many_pieces, HttpLimits()) as (_, port):
        async with RawClient.to(port) as client:
            await client.send(GET)
            await client.some(within_s=120)
            client.reset()
            go.set()  # before the server has received anything
        async with asyncio.timeout(120):
            await is_written.wait()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
