"""Tools of real MCP servers: results and errors for the model, calls without an answer, connections that break."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from headrace.local.held_port import HeldPort
from services.sessions.tools import mcp_tools
from services.sessions.tools.mcp_config import HttpServer, McpServer, StdioServer
from services.sessions.tools.mcp_tools import McpTools
from services.sessions.tools.tool_answer import MAX_RESULT_CHARS
from services.sessions.tools.tool_errors import ToolError, ToolLostError
from shared.errors import UserError
from tests.eventually import eventually

_BROKEN = str(Path(__file__).with_name("broken_mcp_server.py"))
_PROGRAM = str(Path(__file__).with_name("mcp_server_under_test.py"))


def broken(*arguments: str) -> StdioServer:
    return StdioServer(command=sys.executable, args=[_BROKEN, *arguments])


def on_stdio() -> StdioServer:
    return StdioServer(command=sys.executable, args=[_PROGRAM], env={"TOKEN_OF_TEST": "known"})


@asynccontextmanager
async def over_http() -> AsyncGenerator[HttpServer]:
    with HeldPort() as port:
        port.let_bind()
        process = await asyncio.create_subprocess_exec(sys.executable, _PROGRAM, str(port.number))
        try:
            yield HttpServer(url=f"http://127.0.0.1:{port.number}/mcp")
        finally:
            process.kill()
            await process.wait()


@asynccontextmanager
async def tools_of(server: McpServer, *, call_timeout_s: float = 60.0) -> AsyncGenerator[McpTools]:
    deadline = time.monotonic() + 120.0
    while True:
        try:
            async with McpTools.connected(
                "test", server, call_timeout_s=call_timeout_s, connect_timeout_s=120
            ) as tools:
                yield tools
                return
        except UserError:  # the HTTP server is still starting
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


@pytest.fixture(params=["stdio", "http"])
async def tools(request: pytest.FixtureRequest) -> AsyncGenerator[McpTools]:
    if request.param == "stdio":
        async with tools_of(on_stdio()) as found:
            yield found
    else:
        async with over_http() as server, tools_of(server) as found:
            yield found


async def test_a_server_s_tools_are_described_as_functions(tools: McpTools) -> None:
    (multiply,) = [schema for schema in tools.schemas if schema["function"]["name"] == "multiply"]
    assert multiply["type"] == "function"
    assert multiply["function"]["description"] == "Multiply two numbers."
    parameters = multiply["function"]["parameters"]
    assert parameters["properties"]["a"]["type"] == "integer"
    assert parameters["required"] == ["a", "b"]


async def test_the_model_reads_texts_and_errors(tools: McpTools) -> None:
    assert await tools.call("multiply", {"a": 6, "b": 7}) == "42"
    assert await tools.call("picture", {}) == "a pixel:\n[image, not shown]"
    cut = await tools.call("long", {})
    assert cut.startswith("x" * MAX_RESULT_CHARS + "\n[The first ")
    for name, arguments, says in (
        ("fails", {}, "there is no such page"),
        ("multiply", {"a": "six"}, "a"),
        ("divide", {}, "divide"),
    ):
        with pytest.raises(ToolError, match=says):
            await tools.call(name, arguments)


async def test_calls_run_at_the_same_time(tools: McpTools) -> None:
    began_at = time.monotonic()
    assert await asyncio.gather(*(tools.call("sleeps", {"seconds": 5.0}) for _ in range(8))) == ["awake"] * 8
    assert time.monotonic() - began_at < 30.0, "one after the other they take 40 s"


async def test_a_call_that_takes_too_long_is_lost_and_the_next_one_is_answered() -> None:
    async with tools_of(on_stdio(), call_timeout_s=5.0) as tools:
        with pytest.raises(ToolLostError, match=r"tool sleeps of MCP server test did not return within 5 s"):
            await tools.call("sleeps", {"seconds": 600})
        assert await tools.call("multiply", {"a": 6, "b": 7}) == "42"


async def test_a_server_that_hangs_is_started_again() -> None:
    async with tools_of(on_stdio(), call_timeout_s=10.0) as tools:
        with pytest.raises(ToolLostError, match="did not return within 10 s"):
            await tools.call("hangs_up_next", {})

        async def works() -> bool:
            try:
                return await tools.call("multiply", {"a": 6, "b": 7}) == "42"
            except ToolLostError:  # it is still starting
                return False

        await eventually(works)


async def test_a_ping_whose_answer_cannot_be_read_is_an_answer() -> None:
    async with tools_of(broken("bad-ping")) as tools:
        with pytest.raises(ToolError, match="unknown"):
            await tools.call("look", {})


async def test_arguments_that_cannot_be_sent_are_answered_and_break_nothing(tools: McpTools) -> None:
    other = asyncio.create_task(tools.call("sleeps", {"seconds": 2.0}))
    with pytest.raises(ToolError, match="the arguments cannot be sent"):
        await tools.call("multiply", {"a": "\ud800"})
    assert await other == "awake"


@pytest.mark.parametrize("mode", ["bad-result", "bad-schema"])
async def test_a_result_that_the_client_cannot_read_loses_the_call(mode: str) -> None:
    async with tools_of(broken(mode)) as tools:
        with pytest.raises(ToolLostError, match="tool look of MCP server test returned what cannot be read"):
            await tools.call("look", {})


async def test_calls_that_wait_for_a_connection_share_one_attempt_within_their_deadline(tmp_path: Path) -> None:
    server = broken("mute-later", str(tmp_path / "started"))
    async with McpTools.connected("test", server, call_timeout_s=10.0, connect_timeout_s=60.0) as tools:
        began_at = time.monotonic()
        found = await asyncio.gather(*(tools.call("look", {}) for _ in range(20)), return_exceptions=True)
        assert time.monotonic() - began_at < 40.0  # one after the other they would take 20 times as long
    assert {type(one) for one in found} == {ToolLostError}


async def test_a_server_that_does_not_answer_is_refused_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "_GOODBYE_S", 60.0)
    before = _children()
    with pytest.raises(UserError, match="no answer within 5 s"):
        async with McpTools.connected("test", broken("mute"), call_timeout_s=5, connect_timeout_s=5):
            pass
    assert _children() <= before


async def test_a_call_whose_server_ended_is_made_once_more(tmp_path: Path) -> None:
    async with tools_of(on_stdio()) as tools:
        calls = [tools.call("ends", {"file": str(tmp_path / "once")}), tools.call("sleeps", {"seconds": 1.0})]
        assert await asyncio.gather(*calls) == ["still here", "awake"]


async def test_a_server_that_does_not_come_back_loses_the_call() -> None:
    serving = AsyncExitStack()
    server = await serving.enter_async_context(over_http())
    try:
        async with tools_of(server) as tools:
            assert await tools.call("multiply", {"a": 1, "b": 1}) == "1"
            await serving.aclose()
            with pytest.raises(ToolLostError, match="tool multiply of MCP server test: "):
                await tools.call("multiply", {"a": 1, "b": 1})
    finally:
        await serving.aclose()


async def test_a_started_server_inherits_no_keys_and_gets_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_INTERNAL_KEY", "secret")
    async with tools_of(on_stdio()) as tools:
        assert await tools.call("variable", {"name": "HEADRACE_INTERNAL_KEY"}) == "(not set)"
        assert await tools.call("variable", {"name": "TOKEN_OF_TEST"}) == "known"


async def test_a_started_server_ends_with_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "_GOODBYE_S", 60.0)
    pids = tmp_path / "pid"
    script = (
        f"import os, runpy; open({str(pids)!r}, 'w').write(str(os.getpid())); "
        f"runpy.run_path({_PROGRAM!r}, run_name='__main__')"
    )
    async with tools_of(StdioServer(command=sys.executable, args=["-c", script])) as tools:
        await tools.call("multiply", {"a": 1, "b": 1})
        pid = int(pids.read_text())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def _children() -> set[str]:
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (broken("bad-list"), "MCP server test cannot be used: .*name"),
        (StdioServer(command="no-such-program"), "MCP server test cannot be used: .*no-such-program"),
        (StdioServer(command=sys.executable, args=["-c", "raise SystemExit(3)"]), "MCP server test cannot be used"),
        (HttpServer(url="http://127.0.0.1:9/mcp"), "MCP server test cannot be used: .*cannot be reached"),
    ],
)
async def test_a_server_that_cannot_be_used_is_refused_with_the_reason(server: McpServer, says: str) -> None:
    with pytest.raises(UserError, match=says):
        async with McpTools.connected("test", server, call_timeout_s=5, connect_timeout_s=60):
            pass
