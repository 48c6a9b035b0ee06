"""An application on a free port of this machine."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from fastapi import FastAPI

from shared.serving.http_limits import HttpLimits
from shared.serving.http_server import HttpServer
from shared.serving.listening import listening_socket
from tests.eventually import eventually


@contextlib.asynccontextmanager
async def served(app: FastAPI) -> AsyncGenerator[str]:
    """Serve an application while the block runs; yield its URL."""
    with listening_socket("127.0.0.1", 0) as listener:
        server = HttpServer(app, HttpLimits(), drain_s=1)
        serving = asyncio.create_task(server.serve(sockets=[listener]), name=f"serve {app.title}")
        await eventually(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            async with asyncio.timeout(120):
                await serving
