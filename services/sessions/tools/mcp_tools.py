"""Calls the tools of MCP servers, over one connection for each run and server.

    server --tools/list--> schemas                     a call --tools/call--> its text
                                                                              ToolError: answered to the model
                                                                              ToolLostError: the rollout is lost

A broken connection is replaced, and a call that was lost with it is repeated once, so a tool may run twice. All
rollouts of a run share the connection, so a rollout can see state that the server kept from another one.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any, cast

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import MCP_SESSION_ID, streamable_http_client
from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT, CallToolResult, TextContent, Tool

from services.sessions.tools.mcp_config import HttpServer, McpServer
from services.sessions.tools.tool_answer import for_model
from services.sessions.tools.tool_errors import ToolError, ToolLostError
from shared.errors import UserError
from shared.serving.shared_answer import SharedAnswer
from shared.user_code.error_text import describe

log = logging.getLogger(__name__)

_MAX_PAGES = 100
_MAX_SHOWN = 500
_MAX_ANSWER_BYTES = 16 << 20
"""Over HTTP, so that a file that the model reads does not fill the service's memory."""
_GOODBYE_S = 5.0
_LOCAL_CODES = (CONNECTION_CLOSED, REQUEST_TIMEOUT)
"""Codes of the SDK's own errors. Servers may choose the same codes for theirs."""
_STREAM_ENDED = "SSE stream ended"
"""How the SDK's error begins if the answer to one call breaks off, while the connection goes on.

If the answer is too large, the error begins in another way, and the call is not repeated.
"""
_HTTP_TIMEOUT = httpx2.Timeout(None, connect=5.0)
"""Calls have deadlines of their own."""
_HTTP_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
"""A call that waits for a connection would do so within its deadline."""


class McpTools:
    """The tools of one MCP server, called over one connection. Create it with ``connected``."""

    def __init__(self, name: str, server: McpServer, *, call_timeout_s: float, connect_timeout_s: float) -> None:
        self.name = name
        self.schemas: list[dict[str, Any]] = []
        """The JSON schemas of the tools, in OpenAI's format."""
        self._server = server
        self._call_timeout_s = call_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._connect = SharedAnswer(self._connect_now)
        self._connection: _Connection | None = None
        self._is_over = False

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(
        cls, name: str, server: McpServer, *, call_timeout_s: float, connect_timeout_s: float
    ) -> "AsyncGenerator[McpTools]":
        """Connect to a server and list its tools; disconnect at the end of the block.

        Args:
            name: The server's name, for messages.
            server: How to reach or start it.
            call_timeout_s: Deadline of one call, in seconds.
            connect_timeout_s: Deadline of connecting, and of listing, in seconds.

        Raises:
            UserError: The server cannot be reached, or does not list its tools.
        """
        tools = cls(name, server, call_timeout_s=call_timeout_s, connect_timeout_s=connect_timeout_s)
        try:
            try:
                connection = await tools._connect()
                async with asyncio.timeout(connect_timeout_s):
                    tools.schemas = [_schema(tool) async for tool in _listed(connection.client)]
            except Exception as error:  # the SDK raises many, also for what the server answers
                raise UserError(
                    f"MCP server {name} cannot be used: {_in_a_line(error)}. See that it runs, and that the file of "
                    "HEADRACE_MCP_CONFIG describes it"
                ) from error
            yield tools
        finally:
            await tools._disconnect(is_over=True)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the server; return the text of its result.

        Raises:
            ToolError: The tool failed, or the server does not take the call.
            ToolLostError: The call has no result.
        """
        _check_sendable(arguments)
        try:
            return await self._called(name, arguments)
        except _BrokenError as error:
            log.warning("MCP server %s: %s; connecting again", self.name, error)
        try:
            return await self._called(name, arguments)
        except _BrokenError as error:
            raise ToolLostError(f"tool {name} of MCP server {self.name}: {error}") from error

    async def _called(self, name: str, arguments: Mapping[str, Any]) -> str:
        connection: _Connection | None = None
        began_at = time.monotonic()
        try:
            async with asyncio.timeout(self._call_timeout_s):
                connection = await self._usable()
                result = await connection.until_broken(connection.client.call_tool(name, dict(arguments)))
        except TimeoutError as error:
            if connection is not None and connection.answered_at < began_at and not await connection.answers():
                log.warning("MCP server %s does not answer any more; connecting again", self.name)
                connection.end()
            raise ToolLostError(
                f"tool {name} of MCP server {self.name} did not return within {self._call_timeout_s:g} s"
            ) from error
        except MCPError as error:
            if connection is not None:
                if error.code in _LOCAL_CODES and not connection.has_ended and not await connection.answers():
                    connection.end()
                if connection.has_ended or str(error).startswith(_STREAM_ENDED):
                    raise _BrokenError(f"the connection broke: {error}") from error
            raise ToolError(for_model(str(error))) from error
        except _BrokenError:
            raise
        except Exception as error:  # the SDK raises many for what a server answers
            raise ToolLostError(
                f"tool {name} of MCP server {self.name} returned what cannot be read: {_in_a_line(error)}"
            ) from error
        if result.is_error:
            raise ToolError(_text(result))
        return _text(result)

    async def _usable(self) -> "_Connection":
        connection = self._connection
        return connection if connection is not None and not connection.has_ended else await self._connect()

    async def _connect_now(self) -> "_Connection":
        """Replace the connection. All calls that wait for a connection share one attempt, and its failure."""
        await self._disconnect()
        connection = await _Connection.open(self._server, timeout_s=self._connect_timeout_s)
        if self._is_over:
            await connection.close()
            raise _BrokenError("the run has ended")
        self._connection = connection
        return connection

    async def _disconnect(self, *, is_over: bool = False) -> None:
        self._is_over = self._is_over or is_over
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class _BrokenError(Exception):
    """The server cannot be reached, or the connection to it broke."""


class _Connection:
    """One connection to an MCP server, in a task of its own: the same task must open and close the SDK's client."""

    def __init__(self, client: Client, task: "asyncio.Task[None]", ending: asyncio.Event) -> None:
        self.client = client
        self._task = task
        self._ending = ending
        self.answered_at = 0.0
        """When the server last answered a call, in monotonic seconds."""

    @classmethod
    async def open(cls, server: McpServer, *, timeout_s: float) -> "_Connection":
        """Connect to the server. Raises _BrokenError if this fails or takes longer than ``timeout_s`` seconds."""
        opened: asyncio.Future[_Connection] = asyncio.get_running_loop().create_future()
        ending = asyncio.Event()

        async def hold() -> None:
            async with contextlib.AsyncExitStack() as stack:
                client = await stack.enter_async_context(await _client(server, stack, ending=ending))
                opened.set_result(cls(client, task, ending))
                await ending.wait()

        task = asyncio.create_task(hold(), name="MCP connection")
        # Its failure is that of its calls. asyncio would log it, too, as one that nobody looked at.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        either: set[asyncio.Future[Any]] = {opened, task}
        try:
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not opened.done():
                await _end(task)
        if not opened.done():
            failure = None if task.cancelled() or not task.done() else task.exception()
            why = f"no answer within {timeout_s:g} s" if failure is None else describe(_cause(failure))
            raise _BrokenError(f"it cannot be reached: {why}")
        return opened.result()

    @property
    def has_ended(self) -> bool:
        """Whether the connection cannot be used any more."""
        return self._ending.is_set() or self._task.done()

    def end(self) -> None:
        """Begin to disconnect. A server that was started as a process is stopped."""
        self._ending.set()

    async def answers(self) -> bool:
        """Whether the server still answers a ping in this session within five seconds, perhaps with an error."""
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self.until_broken(self.client.session.send_ping())
        except MCPError as error:  # newer protocols have no ping
            return error.code not in _LOCAL_CODES
        except (TimeoutError, _BrokenError):
            return False
        except Exception:  # noqa: BLE001  the SDK raises many for what a server answers
            return not self.has_ended
        return True

    async def until_broken(self, call: Any) -> CallToolResult:
        """Await a call of the client, or raise _BrokenError when the connection ends first."""
        calling: asyncio.Task[CallToolResult] = asyncio.ensure_future(call)
        try:
            await asyncio.wait({calling, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise _BrokenError("the connection ended")
            answer = calling.result()
            self.answered_at = time.monotonic()
            return answer
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)

    async def close(self) -> None:
        """Disconnect. If the server does not answer within five seconds, the connection's task is cancelled."""
        self.end()
        if not (await asyncio.wait({self._task}, timeout=_GOODBYE_S))[0]:
            await _end(self._task)


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=_GOODBYE_S)


def _check_sendable(arguments: Mapping[str, Any]) -> None:
    """Raise ToolError if the SDK cannot send the arguments: an attempt would break the connection of all rollouts."""
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # half a surrogate pair, for example
        raise ToolError(f"the arguments cannot be sent: {describe(error)}") from error


async def _client(server: McpServer, stack: contextlib.AsyncExitStack, *, ending: asyncio.Event) -> Client:
    """Return the MCP SDK's client. If an HTTP server no longer knows the session, the client sets ``ending``."""

    async def end_with_session(response: httpx2.Response) -> None:
        # The status tells it, and of old servers a body that is not JSON. Each kind of server has another code in it.
        request, kind = response.request, response.headers.get("content-type", "")
        is_in_session = request.method == "POST" and MCP_SESSION_ID in request.headers
        is_old = response.status_code == HTTPStatus.BAD_REQUEST and not kind.startswith("application/json")
        if is_in_session and (is_old or response.status_code == HTTPStatus.NOT_FOUND):
            ending.set()

    async def limit(response: httpx2.Response) -> None:
        if not response.headers.get("content-type", "").startswith("text/event-stream"):  # the SDK limits its events
            response.stream = _LimitedBody(cast("httpx2.AsyncByteStream", response.stream))

    if isinstance(server, HttpServer):
        http = await stack.enter_async_context(
            httpx2.AsyncClient(
                # Without compression, because the limit counts bytes as they arrive.
                headers={"Accept-Encoding": "identity", **server.headers},
                timeout=_HTTP_TIMEOUT,
                limits=_HTTP_LIMITS,
                event_hooks={"response": [end_with_session, limit]},
            )
        )
        return Client(streamable_http_client(server.url, http_client=http, max_sse_event_size=_MAX_ANSWER_BYTES))
    return Client(StdioServerParameters(command=server.command, args=server.args, env=dict(server.env), cwd=server.cwd))


class _LimitedBody(httpx2.AsyncByteStream):
    """The body of a response, with an error that the SDK knows after ``_MAX_ANSWER_BYTES``."""

    def __init__(self, body: httpx2.AsyncByteStream) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in self._body:
            num_bytes += len(part)
            if num_bytes > _MAX_ANSWER_BYTES:
                raise httpx2.StreamError(f"the answer exceeded the {_MAX_ANSWER_BYTES} byte limit")
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()


async def _listed(client: Client) -> AsyncGenerator[Tool]:
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            yield tool
        cursor = page.next_cursor
        if cursor is None:
            return
    raise _BrokenError(f"its list of tools has more than {_MAX_PAGES} pages")


def _schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
    }


def _text(result: CallToolResult) -> str:
    """Return a tool's result as text for the model: its text blocks, and only the types of all other blocks."""
    shown = [block.text if isinstance(block, TextContent) else f"[{block.type}, not shown]" for block in result.content]
    return for_model("\n".join(shown))


def _in_a_line(error: Exception) -> str:
    return " ".join(describe(error).split())[:_MAX_SHOWN]


def _cause(error: BaseException) -> BaseException:
    """Return the first error in nested exception groups, or the error itself."""
    found: Any = error
    while isinstance(found, BaseExceptionGroup):
        found = cast("Any", found).exceptions[0]
    return cast("BaseException", found)
