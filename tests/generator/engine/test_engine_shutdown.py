"""The end of an engine in a process that goes on."""

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
import zmq

from services.generator.engine import engine as engine_module
from services.generator.engine.engine import Engine
from services.generator.engine.engine_spec import EngineSpec
from tests.eventually import eventually

pytestmark = pytest.mark.vllm


def engine_with(context: zmq.Context[Any]) -> Engine:
    """Return an engine whose client is gone already, and only has its ZeroMQ context left."""
    client = Mock(output_handler=None)
    client.engine_core.resources.ctx = context
    return Engine(client, EngineSpec("m", None, "float32", None))


@pytest.mark.usefixtures("vllm_environment")
async def test_a_socket_that_stays_open_does_not_stop_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "_ZEROMQ_ENDS_S", 0.5)
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.PULL)
    try:
        async with asyncio.timeout(60):
            await engine_with(context).shutdown()
        assert "did not close" in caplog.text
        assert not context.closed
    finally:
        socket.close(linger=0)
    await eventually(lambda: context.closed)  # in its thread


@pytest.mark.usefixtures("vllm_environment")
async def test_the_context_of_an_engine_ends_with_it(caplog: pytest.LogCaptureFixture) -> None:
    context: zmq.Context[Any] = zmq.Context()
    context.socket(zmq.PULL).close(linger=0)
    await engine_with(context).shutdown()
    assert context.closed
    assert "did not close" not in caplog.text
