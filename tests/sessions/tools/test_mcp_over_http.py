"""Tools of MCP servers over HTTP: lost sessions, large results, and as many calls at a time as a run has rollouts."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from services.sessions.tools.mcp_config import HttpServer
from services.sessions.tools.mcp_tools import McpTools
from services.sessions.tools.tool_answer import MAX_RESULT_CHARS
from services.sessions.tools.tool_errors import ToolError
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


@pytest.mark.parametrize("answers_json", [False, True])
async def test_a_huge_result_is_an_error_for_the_model_and_leaves_other_calls_alone(*, answers_json: bool) -> None:
    server = McpOverHttp(answers_json=answers_json)
    async with tools_of(server) as tools:
        waiting = asyncio.create_task(tools.call("waits", {}))
        await eventually(lambda: server.calls)
        with pytest.raises(ToolError, match="exceeded the 16777216 byte limit"):
            await tools.call("huge", {})
        server.may_return.set()
        assert await waiting == "done"
        assert (await tools.call("long", {})).startswith("x" * MAX_RESULT_CHARS)
    assert (server.calls, server.num_sessions) == (["waits", "huge", "long"], 1), "the large call is not repeated"


async def test_all_calls_are_sent_at_once() -> None:
    server = McpOverHttp()
    async with tools_of(server) as tools:
        calls = [asyncio.create_task(tools.call("waits", {})) for _ in range(120)]
        await eventually(lambda: len(server.calls) == 120, within_s=60)
        server.may_return.set()
        assert await asyncio.gather(*calls) == ["done"] * 120


@pytest.mark.parametrize(
    "unknown_session",
    [
        pytest.param((404, "not found", "text/plain"), id="as the protocol says"),
        pytest.param(
            (404, '{"jsonrpc": "2.0", "id": null, "error": {"code": -32600, "message": "Session not found"}}',
             "application/json"),
            id="as the Python SDK",
        ),
        pytest.param(
            (400, '{"jsonrpc": "2.0", "id": null, "error": {"code": -32000, "message": "No valid session ID"}}',
             "application/json"),
            id="as servers of the TypeScript SDK",
        ),
        pytest.param((400, "no valid session ID", "text/plain"), id="as old versions of the Python SDK"),
    ],
)  # fmt: skip
async def test_a_call_in_a_session_that_the_server_forgot_is_made_in_a_new_one(
    unknown_session: tuple[int, str, str],
) -> None:
    server = McpOverHttp(unknown_session)
    server.may_return.set()
    async with tools_of(server) as tools:
        assert await tools.call("waits", {}) == "done"
        server.forget_sessions()
        assert await tools.call("waits", {}) == "done"
        assert await tools.call("waits", {}) == "done"
    assert server.num_sessions == 2


async def test_a_gateway_that_refuses_a_call_leaves_others_alone() -> None:
    server = McpOverHttp()
    async with tools_of(server) as tools:
        waiting = asyncio.create_task(tools.call("waits", {}))
        await eventually(lambda: server.calls)
        server.is_busy = True
        with pytest.raises(ToolError):
            await tools.call("waits", {})
        server.is_busy = False
        server.may_return.set()
        assert await waiting == "done"
    assert (server.calls, server.num_sessions) == (["waits"], 1)


@pytest.mark.parametrize("code", [-32600, -32000, -32001])  # the last two are those of the SDK's own errors, too
async def test_an_error_that_the_server_answers_keeps_the_session(code: int) -> None:
    server = McpOverHttp(code=code)
    async with tools_of(server) as tools:
        waiting = asyncio.create_task(tools.call("waits", {}))
        await eventually(lambda: server.calls)
        with pytest.raises(ToolError, match="there is no such page"):
            await tools.call("fails", {})
        server.may_return.set()
        assert await waiting == "done"
    assert (server.calls, server.num_sessions) == (["waits", "fails"], 1)
