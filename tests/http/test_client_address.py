"""The address in the access log is that of the other end of the connection, whatever headers the client sends."""

import asyncio
import logging

import pytest

from shared.access import entrance
from shared.access.keyring import Keyring
from shared.access.route_table import TRAINER
from shared.service.logs import ACCESS_LOGGER
from shared.serving.http_guard import Receive, Scope, Send
from shared.serving.http_limits import HttpLimits
from shared.serving.http_server import HttpServer
from shared.serving.listening import listening_socket
from tests.eventually import eventually
from tests.http.raw_client import RawClient


async def application(scope: Scope, _receive: Receive, send: Send) -> None:
    body = str(scope["client"][0]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


async def test_a_local_client_cannot_give_itself_another_address(caplog: pytest.LogCaptureFixture) -> None:
    limits = HttpLimits()
    app = entrance.guarded(application, routes=TRAINER, keyring=Keyring(), limits=limits)
    with listening_socket("127.0.0.1", 0) as listener, caplog.at_level(logging.INFO, logger=ACCESS_LOGGER):
        server = HttpServer(app, limits, drain_s=1)
        task = asyncio.create_task(server.serve(sockets=[listener]), name="server under test")
        await eventually(lambda: server.started)
        async with RawClient.to(listener.getsockname()[1]) as client:
            await client.send(b"GET /v1/runs HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 10.9.8.7\r\n\r\n")
            answer = await client.until_closed()
        server.should_exit = True
        async with asyncio.timeout(120):
            await task
    assert b"127.0.0.1" in answer
    assert caplog.messages[-1].endswith("from 127.0.0.1")
