"""The door: which header carries the key, and what happens to a response whose key is removed meanwhile."""

import asyncio
import base64
import contextlib
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from shared.access.door import Door
from shared.access.entrance import HeadRequests
from shared.access.keyring import Keyring
from shared.access.named_keys import NamedKey, digest_of
from shared.access.route_table import Route, RouteTable, Scope
from tests.eventually import eventually

ROUTES = RouteTable(
    Route("a", "GET", "/livez", None), Route("b", "GET", "/stream", "read"), Route("c", "POST", "/slow", "score"),
    Route("d", "POST", "/echo", "score"), Route("e", "GET", "/waits", "read"), Route("f", "GET", "/file", "read"),
)  # fmt: skip


def line(name: str, *scopes: Scope, expires: str = "") -> str:
    return f"{NamedKey(name, digest_of(name.encode()), frozenset(scopes)).line()} {expires}\n"


class Streams:
    """An application whose responses take as long as a test wants."""

    def __init__(self) -> None:
        self.num_open = 0
        self.release = asyncio.Event()
        self.app = FastAPI()
        self.app.add_api_route("/livez", self.livez)
        self.app.add_api_route("/stream", self.stream)
        self.app.add_api_route("/slow", self.slow, methods=["POST"])
        self.app.add_api_route("/echo", self.echo, methods=["POST"])
        self.app.add_api_route("/waits", self.waits)
        self.app.add_api_route("/file", self.file)

    async def livez(self) -> str:
        return "alive"

    async def stream(self) -> StreamingResponse:
        async def never_ending() -> AsyncGenerator[bytes]:
            self.num_open += 1
            try:
                yield b"data: first\n\n"
                await asyncio.Event().wait()
            finally:
                self.num_open -= 1

        return StreamingResponse(never_ending(), media_type="text/event-stream")

    async def file(self) -> StreamingResponse:
        async def two_chunks() -> AsyncGenerator[bytes]:
            yield b"x" * 10
            await self.release.wait()
            yield b"x" * 10

        return StreamingResponse(two_chunks(), headers={"content-length": "20"})

    async def slow(self) -> str:
        await self.release.wait()
        return "done"

    async def echo(self, request: Request) -> int:
        return len(await request.body())

    async def waits(self, request: Request) -> Response:
        """Stop when the client has hung up, as generation does."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        return Response("nobody reads this", status_code=499)


@contextlib.asynccontextmanager
async def served(streams: Streams, keyring: Keyring) -> AsyncGenerator[httpx.AsyncClient]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        door = HeadRequests(Door(streams.app, routes=ROUTES, keyring=keyring))
        server = uvicorn.Server(uvicorn.Config(door, log_config=None, lifespan="off", timeout_graceful_shutdown=2))
        task = asyncio.create_task(server.serve(sockets=[listener]), name="server under test")
        try:
            async with asyncio.timeout(120), httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
                while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
                    await asyncio.sleep(0.01)
                yield client
        finally:
            server.should_exit = True
            await task


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class KeysFile:
    """A keys file that a test edits as an operator would."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *lines: str) -> None:
        self.path.write_text("".join(lines))


@pytest.fixture
def file(tmp_path: Path) -> KeysFile:
    file = KeysFile(tmp_path / "api-keys")
    file.write(line("watcher", "read", "score"))
    return file


async def status(keyring: Keyring, authorization: str, path: str = "/stream") -> int:
    async def nothing(*_: object) -> None:
        """Do not answer, so the client below sees a 500."""

    transport = httpx.ASGITransport(app=Door(nothing, routes=ROUTES, keyring=keyring), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        with contextlib.suppress(AssertionError):
            return (await client.get(path, headers={"authorization": authorization})).status_code
    return 200


@pytest.mark.parametrize(
    "value", ["Bearer", "Bearer ", "Basic public", "public", "Bearer publi", "Bearer publicx", "Bearer public x", ""]
)
async def test_a_wrong_header_is_not_a_key(value: str) -> None:
    assert await status(Keyring(api="public"), value) == 401


@pytest.mark.parametrize("value", ["Bearer public", "bearer public", "BEARER  public "])
async def test_a_bearer_key_opens(value: str) -> None:
    assert await status(Keyring(api="public"), value) == 200


@pytest.mark.parametrize(("userinfo", "expected"), [(":public", 200), ("anybody:public", 200), ("public:", 401)])
async def test_the_key_may_be_the_password_of_a_url(userinfo: str, expected: int) -> None:
    assert await status(Keyring(api="public"), f"Basic {base64.b64encode(userinfo.encode()).decode()}") == expected


async def test_a_wrong_key_is_told_from_a_missing_one(file: KeysFile) -> None:
    async with served(Streams(), Keyring(file=file.path)) as client:
        wrong, missing = await client.get("/stream", headers=bearer("wrong")), await client.get("/stream")
    assert (wrong.status_code, missing.status_code) == (401, 401)
    assert wrong.json()["detail"].startswith("This service does not know the key that was sent.")
    assert missing.json()["detail"].startswith("Send the header")


async def test_an_expired_key_is_refused_with_the_reason(file: KeysFile) -> None:
    file.write(line("watcher", "read", expires="2020-01-01"))
    async with served(Streams(), Keyring(file=file.path)) as client:
        refused = await client.get("/stream", headers=bearer("watcher"))
    assert refused.status_code == 401
    assert refused.json()["detail"].startswith("The key watcher has expired.")


@pytest.mark.parametrize(
    "left",
    [
        pytest.param("", id="revoked"),
        pytest.param(line("watcher", "score"), id="loses its scope"),
        pytest.param(line("watcher", "read", expires="2020-01-01"), id="expires"),
    ],
)
async def test_a_stream_ends_when_its_key_is_revoked_loses_its_scope_or_expires(file: KeysFile, left: str) -> None:
    streams = Streams()
    async with served(streams, Keyring(api="the one", file=file.path)) as client:
        async with (
            client.stream("GET", "/stream", headers=bearer("watcher")) as watched,
            client.stream("GET", "/stream", headers=bearer("the one")) as lasting,
        ):
            chunks = watched.aiter_bytes()
            assert await anext(chunks) == b"data: first\n\n"
            other_chunks = lasting.aiter_bytes()
            assert await anext(other_chunks) == b"data: first\n\n"
            assert streams.num_open == 2
            file.write(left)
            assert [chunk async for chunk in chunks] == [], "it ends like a finished stream, without an error"
            assert streams.num_open == 1, "the stream of the other key goes on"
        refused = await client.get("/stream", headers=bearer("watcher"))
        assert refused.status_code == (403 if "score" in left else 401)


async def test_a_stream_goes_on_when_the_file_changes_and_its_key_does_not(file: KeysFile) -> None:
    streams = Streams()
    async with served(streams, Keyring(file=file.path)) as client:
        async with client.stream("GET", "/stream", headers=bearer("watcher")) as watched:
            chunks = watched.aiter_bytes()
            assert await anext(chunks) == b"data: first\n\n"
            file.write(line("watcher", "read"), line("another", "read"))
            async with client.stream("GET", "/stream", headers=bearer("another")) as second:
                other_chunks = second.aiter_bytes()
                assert await anext(other_chunks) == b"data: first\n\n"
                file.write(line("watcher", "read"))
                assert [chunk async for chunk in other_chunks] == []
            assert streams.num_open == 1
        while streams.num_open:  # noqa: ASYNC110  it notices that its client hung up
            await asyncio.sleep(0.01)


async def test_an_answer_of_known_length_is_sent_to_its_end(file: KeysFile, caplog: pytest.LogCaptureFixture) -> None:
    streams = Streams()
    async with served(streams, Keyring(file=file.path)) as client:
        async with (
            client.stream("GET", "/stream", headers=bearer("watcher")) as beside,
            client.stream("GET", "/file", headers=bearer("watcher")) as download,
        ):
            chunks = download.aiter_raw()
            assert await anext(chunks) == b"x" * 10
            file.write("")
            assert [chunk async for chunk in beside.aiter_raw()] != [], "a stream with this key has ended"
            streams.release.set()
            assert [chunk async for chunk in chunks] == [b"x" * 10]
        assert (await client.get("/file", headers=bearer("watcher"))).status_code == 401
    assert "Exception in ASGI application" not in caplog.text


async def test_an_answer_that_does_not_watch_its_client_is_finished(file: KeysFile) -> None:
    streams = Streams()
    async with served(streams, Keyring(file=file.path)) as client:
        slow = asyncio.create_task(client.post("/slow", headers=bearer("watcher"), content=b"x" * 100_000))
        watched = asyncio.create_task(client.get("/waits", headers=bearer("watcher")))
        await asyncio.sleep(0)
        assert (await client.post("/echo", headers=bearer("watcher"), content=b"x" * 100_000)).json() == 100_000
        file.write("")
        given_up = await watched
        streams.release.set()
        assert (await slow).json() == "done"
    assert given_up.status_code == 401, "it ended, although the client did not hang up"


async def test_head_of_a_stream_is_answered_at_once_and_leaves_no_stream_behind(file: KeysFile) -> None:
    streams = Streams()
    async with served(streams, Keyring(file=file.path)) as client:
        head = await client.head("/stream", headers=bearer("watcher"))
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"].startswith("text/event-stream")
        await eventually(lambda: streams.num_open == 0)
