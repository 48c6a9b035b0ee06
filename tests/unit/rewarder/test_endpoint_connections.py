"""Connections that are kept, swept, cut off and given up, with a network of the test's."""

import asyncio
import contextlib
import ssl
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpcore
import pytest

from services.rewarder.endpoints.bounded_stream import BoundedStream
from services.rewarder.endpoints.connections import Connections
from services.rewarder.endpoints.pinned_network import Resolver

REQUEST = httpcore.Request("POST", "http://judge.example/")


class FakeConnection:
    """Counts nothing, and insists that whoever uses it is alone."""

    made: list["FakeConnection"]

    def __init__(self, _origin: httpcore.Origin, **_more: Any) -> None:
        self.is_in_use = self.is_closed = self.has_gone = False
        self.may_close, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_close.set()
        self.made.append(self)

    async def handle_async_request(self, _request: httpcore.Request) -> httpcore.Response:
        assert not self.is_in_use
        assert not self.is_closed
        self.is_in_use = True
        return httpcore.Response(200, content=self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await self.may_answer.wait()
        yield b"[1.0]"

    def is_idle(self) -> bool:
        return not self.is_in_use and not self.is_closed

    is_available = is_idle

    def has_expired(self) -> bool:
        return self.has_gone

    async def aclose(self) -> None:
        """Close the answer, or what is idle."""
        if self.is_in_use and self.may_answer.is_set():
            self.is_in_use = False
            return
        assert not self.is_in_use, "somebody waits for an answer on it"
        await self.may_close.wait()
        self.is_closed = True


async def turn_loop() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeConnection]:
    monkeypatch.setattr(FakeConnection, "made", [], raising=False)
    monkeypatch.setattr(httpcore, "AsyncHTTPConnection", FakeConnection)
    return FakeConnection.made


def sending(connections: Connections) -> "asyncio.Task[None]":
    async def send() -> None:
        async with connections.send(REQUEST) as response:
            async for _ in response.aiter_stream():
                pass

    return asyncio.create_task(send())


async def test_a_sweep_while_a_dead_connection_is_closed_gives_no_connection_to_two(made: list[FakeConnection]) -> None:
    connections = Connections(httpcore.AsyncNetworkBackend(), ssl_context=ssl.create_default_context())
    first = [sending(connections) for _ in range(3)]
    await turn_loop()
    for connection in made:
        connection.may_answer.set()
        await turn_loop()
    await asyncio.gather(*first)
    old, good, dead = made
    good.may_answer.clear()
    dead.has_gone = True
    dead.may_close.clear()
    slow = sending(connections)
    await turn_loop()  # it has the dead one, and waits until that is closed
    old.has_gone = True
    await connections.sweep()
    assert old.is_closed
    quick = sending(connections)
    await turn_loop()
    assert good.is_in_use
    dead.may_close.set()
    await turn_loop()
    assert len(made) == 4, "the slow one has a new connection"
    made[3].may_answer.set()
    good.may_answer.set()
    await asyncio.gather(slow, quick)
    assert not good.is_closed
    await connections.aclose()


async def test_what_is_idle_is_closed_after_a_while_although_nobody_sends_any_more(
    made: list[FakeConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rewarder.endpoints.connections._SWEEP_EVERY_S", 0.0)
    connections = Connections(httpcore.AsyncNetworkBackend(), ssl_context=ssl.create_default_context())
    sent = sending(connections)
    await turn_loop()
    made[0].may_answer.set()
    await sent
    await turn_loop()
    assert not made[0].is_closed
    made[0].has_gone = True
    await turn_loop()
    assert made[0].is_closed
    await connections.aclose()


class FakeStream(httpcore.AsyncNetworkStream):
    """Has always something to read, and never ends its handshake."""

    def __init__(self) -> None:
        self.is_closed = False
        self.shakes_hands = asyncio.Event()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        return b" " * max_bytes

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Take it."""

    async def aclose(self) -> None:
        self.is_closed = True

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        self.shakes_hands.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_more_than_an_answer_can_be_is_not_read_and_each_request_counts_anew() -> None:
    stream = BoundedStream(FakeStream(), max_bytes=100)
    for _ in range(3):
        await stream.write(b"POST")
        assert len(await stream.read(60)) == 60
        assert len(await stream.read(40)) == 40
    with pytest.raises(httpcore.ReadError, match="it sent more than 100 bytes"):
        await stream.read(1)


async def test_a_handshake_that_is_cancelled_leaves_no_socket() -> None:
    inner = FakeStream()
    shaking = asyncio.create_task(BoundedStream(inner, max_bytes=100).start_tls(ssl.create_default_context()))
    await inner.shakes_hands.wait()
    shaking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await shaking
    assert inner.is_closed


async def test_a_thread_that_cannot_be_started_leaves_the_name_resolvable(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver()

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    for _ in range(100):  # more often than there are threads
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(OSError, match="no thread can be started"):
                await resolver("127.0.0.1", 80)
    assert await resolver("127.0.0.1", 80) == ["127.0.0.1"]


async def test_no_more_names_are_asked_for_at_a_time_than_there_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, may_answer = list[str](), threading.Event()

    def slowly(host: str, *_more: Any, **_named: Any) -> list[Any]:
        asked.append(host)
        assert may_answer.wait(60)
        return [(None, None, None, "", ("127.0.0.1", 80))]

    monkeypatch.setattr("socket.getaddrinfo", slowly)
    monkeypatch.setattr("services.rewarder.endpoints.pinned_network._MAX_THREADS", 2)
    resolver = Resolver()
    waiting = [asyncio.create_task(resolver(f"host-{number % 3}.example", 80)) for number in range(6)]
    await turn_loop()
    assert {thread.name for thread in threading.enumerate() if thread.name.startswith("resolve host-")} == {
        "resolve host-0.example", "resolve host-1.example",
    }  # fmt: skip
    may_answer.set()
    assert await asyncio.gather(*waiting) == [["127.0.0.1"]] * 6
    assert set(asked) == {"host-0.example", "host-1.example", "host-2.example"}
