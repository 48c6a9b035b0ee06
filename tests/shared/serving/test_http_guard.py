"""A server's limits: number of requests, size of a body, time for it. Probes are always answered."""

import asyncio
import json
import logging
from dataclasses import replace

import pytest

from shared.serving.http_guard import App, HttpGuard, Message, Receive, Scope, Send
from shared.serving.http_limits import HttpLimits

pytestmark = pytest.mark.unit

LIMITS = HttpLimits(body_timeout_s=0.05, max_body_bytes=100)


async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the length of the body; do not answer if the client disconnects."""
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError(f"no body for {scope['path']}")
        length += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    await answer(send, str(length))


async def answer(send: Send, text: str) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": text.encode()})


class Client:
    """Sends one request in pieces; after the last one it sends nothing."""

    def __init__(
        self, *pieces: bytes, is_whole: bool = True, leaves: bool = False, declares: int | None = None
    ) -> None:
        length = sum(map(len, pieces)) if declares is None else declares
        self.headers = [(b"content-length", str(length).encode())] if declares != -1 else [(b"transfer-encoding", b"")]
        self.num_taken = 0
        self.sent: list[Message] = []
        self._messages: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        if is_whole and self._messages:
            self._messages[-1]["more_body"] = False
        if leaves:
            self._messages.append({"type": "http.disconnect"})

    def sends_nothing(self) -> None:
        self._messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive(self) -> Message:
        if self.num_taken == len(self._messages):
            await asyncio.Event().wait()
        self.num_taken += 1
        return self._messages[self.num_taken - 1]

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def ask(self, app: App, path: str = "/v1/things") -> None:
        await app({"type": "http", "method": "POST", "path": path, "headers": self.headers}, self.receive, self.send)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    def said(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


def limited(app: App = read_all) -> HttpGuard:
    return HttpGuard(app, LIMITS)


async def test_a_body_within_the_limits_is_passed_on() -> None:
    client = Client(b"x" * 60, b"y" * 40)
    await client.ask(limited())
    assert (client.status, client.said()) == (200, "100")


@pytest.mark.parametrize("declares", [None, -1])
async def test_a_body_that_is_too_large_is_refused_without_being_read_to_its_end(declares: int | None) -> None:
    client = Client(*[b"x" * 60] * 1000, declares=declares)
    await client.ask(limited())
    assert client.status == 413
    assert json.loads(client.said())["detail"] == "A request may have at most 100 bytes."
    assert client.num_taken == (0 if declares is None else 2)


async def test_a_body_that_does_not_come_is_a_408_whatever_the_application_makes_of_it() -> None:
    client = Client(b"x", is_whole=False, declares=50)
    await client.ask(limited())
    assert client.status == 408
    assert json.loads(client.said())["title"] == "Body too slow"


async def test_time_in_which_the_server_does_not_wait_for_the_client_does_not_count() -> None:
    async def keeps_it_waiting(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        async with asyncio.timeout(120):
            await asyncio.sleep(LIMITS.body_timeout_s * 2)  # as a queue does
        await read_all(scope, receive, send)

    client = Client(b"x", b"y", b"z")
    await client.ask(limited(keeps_it_waiting))
    assert (client.status, client.said()) == (200, "2")


async def test_a_client_that_goes_away_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    client = Client(b"x", is_whole=False, leaves=True, declares=50)
    with caplog.at_level(logging.INFO):
        await client.ask(limited())
    assert [record.getMessage() for record in caplog.records] == [
        "POST '/v1/things': the client went away before its body was whole"
    ]
    assert caplog.records[0].exc_info is None
    assert client.sent == []


async def test_an_unrelated_failure_is_not_hidden() -> None:
    async def fails(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise KeyError("a mistake of ours")

    with pytest.raises(KeyError):
        await Client(b"x").ask(limited(fails))


async def test_one_request_too_many_gets_retry_after_and_a_probe_is_still_answered() -> None:
    is_at_work, may_end = asyncio.Event(), asyncio.Event()

    async def takes_long(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/things":
            is_at_work.set()
            await may_end.wait()
        await read_all(scope, receive, send)

    app = HttpGuard(takes_long, replace(LIMITS, max_requests=1))
    first, second, probe = (Client() for _ in range(3))
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(first.ask(app))
        await is_at_work.wait()
        await second.ask(app)
        assert second.status == 503
        assert (b"retry-after", b"1") in second.sent[0]["headers"]
        probe.sends_nothing()
        await probe.ask(app, "/livez")
        assert probe.status == 200
        may_end.set()
        first.sends_nothing()
    assert (first.status, first.said()) == (200, "0")


async def reached(scope_type: str, *incoming: Message) -> tuple[bool, list[Message]]:
    """Return whether the application was called, and the door's response."""
    was_reached, sent, waiting = False, list[Message](), list(incoming)

    async def application(_scope: Scope, _receive: Receive, _send: Send) -> None:
        nonlocal was_reached
        was_reached = True

    async def receive() -> Message:
        return waiting.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    guard = HttpGuard(application)
    await guard({"type": scope_type, "path": "/livez", "headers": []}, receive, send)
    return was_reached, sent


async def test_a_websocket_is_closed_before_it_opens() -> None:
    assert await reached("websocket", {"type": "websocket.connect"}) == (
        False,
        [{"type": "websocket.close", "code": 1008}],
    )


async def test_the_servers_own_start_and_end_are_let_through() -> None:
    assert await reached("lifespan") == (True, [])
