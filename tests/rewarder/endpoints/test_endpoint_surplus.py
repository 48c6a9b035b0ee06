"""Data that an endpoint sends before, around or after its answer never answers another request. Real HTTP."""

import asyncio

import pytest

from services.rewarder.endpoints.endpoint_source import Endpoints
from tests.eventually import eventually
from tests.rewarder.conftest import call_with
from tests.rewarder.endpoints.conftest import ask, register
from tests.rewarder.endpoints.misbehaving_server import Behaviour, MisbehavingServer, Received, answers, sends

CALL = call_with("a", "b", answer="42")
GOOD = answers([1.0, 0.5])
OK = b"HTTP/1.1 200 OK\r\n"
HEAD = OK + b"Content-Length: 12\r\n\r\n"
FIRST, SECOND = HEAD + b"[0.25, 0.25]", HEAD + b"[9.00, 9.00]"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\nc\r\n[0.25, 0.25]\r\n0\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        FIRST + SECOND,
        FIRST + SECOND * 1000,
        CHUNKED + b"\r\n" + SECOND,
        CHUNKED + b"X-Trailer: 1\r\n\r\n" + SECOND,
        FIRST + b"\r\n\r\n" + SECOND,
        FIRST + b"HTTP/1.1 100 Continue\r\n\r\n" + SECOND,
        FIRST + b"POST / HTTP/1.1\r\nHost: x\r\n\r\n",
        FIRST + b"\x16\x03\x01\x02\x00",
        b"HTTP/1.1 103 Early Hints\r\nLink: </>\r\n\r\n" + FIRST + SECOND,
        b"HTTP/1.1 100 Continue\r\nContent-Length: 5\r\n\r\n" + FIRST + SECOND,
        OK + b"Content-Length: 12\r\nConnection: keep-alive\r\n\r\n[0.25, 0.25][9.00, 9.00]",
        b"HTTP/1.0 200 OK\r\nContent-Length: 12\r\nConnection: keep-alive\r\n\r\n[0.25, 0.25]" + SECOND,
    ],
)
async def test_bytes_after_an_answer_are_never_taken_for_an_answer(
    endpoints: Endpoints, server: MisbehavingServer, sent: bytes
) -> None:
    await register(endpoints, "chatty", server.on("/chatty", sends(sent)))
    await register(endpoints, "good", server.on("/good", GOOD))
    for _ in range(3):
        assert [verdict.value for verdict in await ask(endpoints, "chatty", CALL)] == [0.25, 0.25]
        assert [verdict.value for verdict in await ask(endpoints, "good", CALL)] == [1.0, 0.5]
    assert len(server.received_at("/good")) == 3
    await eventually(lambda: server.num_open == 0)


@pytest.mark.parametrize("is_meanwhile", [False, True], ids=["between requests", "while the next waits"])
async def test_a_late_second_answer_is_never_taken_for_an_answer(
    endpoints: Endpoints, server: MisbehavingServer, is_meanwhile: bool
) -> None:
    next_is_there, late_is_sent = asyncio.Event(), asyncio.Event()
    if not is_meanwhile:
        next_is_there.set()

    async def answers_twice(_request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(FIRST)
        await writer.drain()

        async def go_on() -> None:
            await next_is_there.wait()
            writer.write(SECOND)
            late_is_sent.set()

        server.beside(go_on())

    async def answers_late(request: Received, writer: asyncio.StreamWriter) -> None:
        next_is_there.set()
        await late_is_sent.wait()
        await GOOD(request, writer)

    await register(endpoints, "chatty", server.on("/chatty", answers_twice))
    await register(endpoints, "good", server.on("/good", answers_late))
    assert [verdict.value for verdict in await ask(endpoints, "chatty", CALL)] == [0.25, 0.25]
    if not is_meanwhile:
        await late_is_sent.wait()
    assert [verdict.value for verdict in await ask(endpoints, "good", CALL)] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("sent", "outcome", "detail"),
    [
        (OK + b"Content-Length: 5\r\n\r\n[1.0, 0.5]", "invalid", "the answer is not JSON at character 5"),
        (OK + b"Content-Length: 50\r\n\r\n[1.0, 0.5]", "timeout", "it did not answer within 1 s"),
        (
            OK + b"Content-Length: 10\r\nContent-Length: 9\r\n\r\n[1.0, 0.5]",
            "error",
            "the connection broke: conflicting",
        ),
        (OK + b"Content-Length: -1\r\n\r\n[1.0, 0.5]", "error", "the connection broke: "),
        (
            OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n[1.0, 0.5]",
            "error",
            "the connection broke: illegal chunk header",
        ),
        (OK + b"Transfer-Encoding: chunked\r\n\r\na\r\n[1.0, 0.5]9", "error", "the connection broke: "),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n[1.0, 0.5]", "error", "the connection broke: "),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 10\r\n\r\n[1.0, 0.5]", "invalid", "the answer is not JSON"),
    ],
    ids=lambda value: value.decode() if isinstance(value, bytes) else "",
)
async def test_an_answer_that_is_cut_wrongly_is_not_guessed_at(
    endpoints: Endpoints, server: MisbehavingServer, sent: bytes, outcome: str, detail: str
) -> None:
    await register(endpoints, "judge", server.on("/judge", sends(sent)), timeout_s=1 if outcome == "timeout" else 30)
    await register(endpoints, "good", server.on("/good", GOOD))
    verdicts = await ask(endpoints, "judge", CALL)
    assert {verdict.outcome for verdict in verdicts} == {outcome}, verdicts
    assert verdicts[0].detail.startswith(f"endpoint judge: {detail}"), verdicts
    assert [verdict.value for verdict in await ask(endpoints, "good", CALL)] == [1.0, 0.5]


@pytest.mark.parametrize("speaks", [FIRST, FIRST + SECOND, b"220 smtp.example.com ESMTP\r\n"])
async def test_bytes_sent_before_a_request_do_not_answer_another_request(
    endpoints: Endpoints, server: MisbehavingServer, speaks: bytes
) -> None:
    server.greeting = speaks
    await register(endpoints, "good", server.on("/good", GOOD))
    early = await ask(endpoints, "good", CALL)
    assert [verdict.value for verdict in early] in ([0.25, 0.25], [None, None])
    server.greeting = b""
    assert [verdict.value for verdict in await ask(endpoints, "good", CALL)] == [1.0, 0.5]


async def test_every_request_has_its_own_connection_and_says_so(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    await register(endpoints, "judge", server.on("/judge", GOOD), max_concurrency=4)
    await asyncio.gather(*(ask(endpoints, "judge", CALL) for _ in range(8)))
    assert server.num_connections == len(server.received) == 8
    assert {request.headers["connection"] for request in server.received} == {"close"}
    await eventually(lambda: server.num_open == 0)


@pytest.mark.parametrize("behave", [GOOD, sends(FIRST + SECOND)])
async def test_a_request_that_is_given_up_leaves_no_connection(
    endpoints: Endpoints, server: MisbehavingServer, behave: Behaviour
) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def slowly(request: Received, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await may_answer.wait()
        await behave(request, writer)

    await register(endpoints, "judge", server.on("/judge", slowly))
    asking = asyncio.create_task(ask(endpoints, "judge", CALL))
    await asked.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    may_answer.set()
    await eventually(lambda: server.num_open == 0)
