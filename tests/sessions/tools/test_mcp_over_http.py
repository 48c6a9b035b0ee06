"""Tools of MCP servers over HTTP: sessions, large results, and as many calls at a time as a run has rollouts."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from services.sessions.tools.mcp_config import HttpServer
from services.sessions.tools.mcp_tools import McpTools
from services.sessions.tools.tool_answer import MAX_RESULT_CHARS
from tests.eventually import eventually
from tests.sessions.served import served
from tests.sessions.tools.mcp_over_http import McpOverHttp


@asynccontextmanager
async def tools_of(server: McpOverHttp) -> AsyncGenerator[McpTools]:
    async with (
        served(server.app()) as url,
        McpTools.connected("test", HttpServer(url=f"{url}/mcp"), call_timeout_s=120, connect_timeout_s=120) as tools,
    ):
        yield tools


async def test_a_result_of_megabytes_leaves_other_calls_alone() -> None:
    server = McpOverHttp()
    async with tools_of(server) as tools:
        waiting = asyncio.create_task(tools.call("waits", {}))
        await eventually(lambda: server.calls)
        assert (await tools.call("long", {})).startswith("x" * MAX_RESULT_CHARS + "\n[The first ")
        server.may_return.set()
        assert await waiting == "done"
    assert server.calls == ["waits", "long"]


async def test_all_calls_are_sent_at_once() -> None:
    server = McpOverHttp()
    async with tools_of(server) as tools:
        calls = [asyncio.create_task(tools.call("waits", {})) for _ in range(120)]
        await eventually(lambda: len(server.calls) == 120, within_s=60)
        server.may_return.set()
        assert await asyncio.gather(*calls) == ["done"] * 120
