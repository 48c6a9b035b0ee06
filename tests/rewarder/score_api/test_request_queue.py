"""Requests that wait for their turn, and clients that give up before."""

import asyncio
import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.score_api.request_queue import BOUNDED_PATHS, RequestQueue
from shared.serving.http_guard import Message, Receive, Scope, Send

pytestmark = pytest.mark.unit


class Application:
    """Reads the whole body, and answers when the test lets it."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.bodies: list[bytes] = []
        self.endings: list[str] = []

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        message, body = await receive(), b""
        while message["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
            message = await receive()
        self.bodies.append(body)
        self.endings.append(str(message["type"]))
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})


class Client:
    """Sends the given messages, and disconnects on request."""

    def __init__(self, *pieces: bytes) -> None:
        self.messages = asyncio.Queue[Message]()
        self.replies: list[Message] = []
        for index, piece in enumerate(pieces):
            self.messages.put_nowait({"type": "http.request", "body": piece, "more_body": index < len(pieces) - 1})

    def hang_up(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    def ask(self, queue: RequestQueue) -> "asyncio.Task[None]":
        return asyncio.create_task(queue({"type": "http", "path": "/v1/score"}, self.messages.get, self.send))

    async def send(self, message: Message) -> None:
        self.replies.append(message)

    def problem(self) -> Any:
        start, body = self.replies
        assert start["status"] == 429
        return json.loads(body["body"])


async def turn_loop() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def queue_before(
    application: Application, *, max_queued: int = 9, queue_timeout_s: float = 60.0
) -> tuple[RequestQueue, RewarderMetrics]:
    metrics = RewarderMetrics(CollectorRegistry())
    queue = RequestQueue(
        application, max_inflight=1, max_queued=max_queued, queue_timeout_s=queue_timeout_s, metrics=metrics
    )
    return queue, metrics


def num_waiting(metrics: RewarderMetrics) -> float | None:
    return metrics.registry.get_sample_value("headrace_reward_queue_depth", {"queue": "requests", "lane": "http"})


@pytest.mark.parametrize("pieces", [(), (b"{}",), (b"{", b"}")])
async def test_a_client_that_hangs_up_gives_its_place_to_the_next(pieces: tuple[bytes, ...]) -> None:
    application = Application()
    queue, metrics = queue_before(application, max_queued=1)
    first, gone, last = Client(b"1"), Client(*pieces), Client(b"3")
    working = first.ask(queue)
    await turn_loop()
    waiting = gone.ask(queue)
    await turn_loop()
    assert num_waiting(metrics) == 1.0
    gone.hang_up()
    await waiting
    assert num_waiting(metrics) == 0.0
    last_working = last.ask(queue)
    await turn_loop()
    assert last.replies == [], "it waits instead of being refused"
    application.may_answer.set()
    await asyncio.gather(working, last_working)
    assert application.bodies == [b"1", b"3"]
    assert gone.replies == []


async def test_a_body_read_while_waiting_is_not_lost() -> None:
    application = Application()
    queue, _ = queue_before(application)
    first, second = Client(b"1"), Client(b"a" * 40_000, b"b" * 40_000, b"c" * 40_000)
    tasks = [first.ask(queue), second.ask(queue)]
    await turn_loop()
    assert second.messages.qsize() == 1, "only a piece of a large body is read"
    application.may_answer.set()
    await asyncio.gather(*tasks)
    assert application.bodies == [b"1", b"a" * 40_000 + b"b" * 40_000 + b"c" * 40_000]


async def test_a_request_that_is_cancelled_leaves_no_trace() -> None:
    application = Application()
    queue, metrics = queue_before(application)
    first, second, third = Client(b"1"), Client(b"2"), Client(b"3")
    tasks = [client.ask(queue) for client in (first, second, third)]
    await turn_loop()
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    application.may_answer.set()
    await asyncio.gather(tasks[0], tasks[2])
    assert application.bodies == [b"1", b"3"]
    assert num_waiting(metrics) == 0.0


async def test_a_full_queue_and_a_wait_without_success_are_reported_to_the_client() -> None:
    application = Application()
    queue, _ = queue_before(application, max_queued=0)
    working = Client(b"1").ask(queue)
    await turn_loop()
    full = Client(b"2")
    await full.ask(queue)
    assert "1 requests are being handled and 0 wait, which is the limit of this rewarder" in full.problem()["detail"]
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    queue, _ = queue_before(application, queue_timeout_s=0.01)
    working, late = Client(b"1").ask(queue), Client(b"2")
    await turn_loop()
    await late.ask(queue)
    assert (
        "This request waited 0.01 s for its turn: 1 at a time, while others were before it" in late.problem()["detail"]
    )
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)


def test_expensive_requests_are_bounded() -> None:
    for path in ("/v1/score", "/v1/rewards/check", "/v1/rewards/judge/test"):
        assert BOUNDED_PATHS.fullmatch(path)
    for path in ("/v1/rewards", "/v1/rewards/judge", "/livez", "/readyz", "/v1/rewards/test"):
        assert not BOUNDED_PATHS.fullmatch(path)
