"""How a generator process ends: in time, also if its engine cannot be shut down."""

import asyncio

import pytest

from services.generator import service_life
from services.generator.service_life import serve_until
from shared.service.cancellation import seen_through
from shared.serving.http_guard import Receive, Scope, Send
from shared.serving.http_limits import HttpLimits
from shared.serving.http_server import HttpServer
from shared.serving.listening import listening_socket

pytestmark = pytest.mark.unit


async def test_an_engine_that_cannot_be_shut_down_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_life, "_STOP_S", 0.2)
    stop, is_ending, stuck = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise AssertionError

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            await seen_through(asyncio.create_task(stuck.wait(), name="stop the engine"))

    async def no_reason(_: str) -> None:
        raise AssertionError

    with listening_socket("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(
            serve_until(
                stop,
                server=HttpServer(app, HttpLimits(), drain_s=1),
                listener=listener,
                work=work(),
                receivers=[],
                say_why=no_reason,
            )
        )
        await asyncio.sleep(0)
        stop.set()
        assert await asyncio.wait_for(serving, 120) == 0
        assert is_ending.is_set()
        stuck.set()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=120)
