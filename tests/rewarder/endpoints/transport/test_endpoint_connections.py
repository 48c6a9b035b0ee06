"""Connections that are cut off and given up, and name lookups, with a fake network."""

import asyncio
import contextlib
import ssl
import threading
from typing import Any

import httpcore
import pytest

from services.rewarder.endpoints.transport.bounded_stream import BoundedStream
from services.rewarder.endpoints.transport.pinned_network import Resolver

pytestmark = pytest.mark.unit


async def turn_loop() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class FakeStream(httpcore.AsyncNetworkStream):
    """Always has something to read, and never completes its handshake."""

    def __init__(self) -> None:
        self.is_closed = False
        self.shakes_hands = asyncio.Event()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        return b" " * max_bytes

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Discard the data."""

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
    monkeypatch.setattr("services.rewarder.endpoints.transport.pinned_network._MAX_THREADS", 2)
    resolver = Resolver()
    waiting = [asyncio.create_task(resolver(f"host-{number % 3}.example", 80)) for number in range(6)]
    await turn_loop()
    assert {thread.name for thread in threading.enumerate() if thread.name.startswith("resolve host-")} == {
        "resolve host-0.example", "resolve host-1.example",
    }  # fmt: skip
    may_answer.set()
    assert await asyncio.gather(*waiting) == [["127.0.0.1"]] * 6
    assert set(asked) == {"host-0.example", "host-1.example", "host-2.example"}
