"""What an OpenEnv server offers, and servers that are none."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from services.sessions.tools.openenv_listing import list_tools
from shared.errors import UserError
from shared.serving.listening import listening_socket
from tests.sessions.served import served

METADATA = {"name": "Board", "description": "Board environment"}
BARE = {"title": "Action", "type": "object", "properties": {"metadata": {"type": "object"}}}
CALL: dict[str, Any] = {"title": "Own", "oneOf": [{"properties": {"tool_name": {}, "arguments": {}}}]}
MOVE = {"title": "Move", "type": "object", "properties": {"metadata": {}, "to": {"$ref": "#/$defs/Field"}}, "$defs": {}}
TOOL = {"name": "look", "description": None, "input_schema": {"type": "object"}}
NO_MCP = {"jsonrpc": "2.0", "id": 1, "error": {"code": -32603, "message": "Environment does not support MCP"}}


@asynccontextmanager
async def server(**answers: Any) -> AsyncGenerator[str]:
    """Answer each path with JSON, or with a response of its own."""
    app = FastAPI()

    @app.api_route("/base/{path}", methods=["GET", "POST"])
    async def answer(path: str, request: Request) -> Response:
        found = answers.get(path)
        if found is None:
            return Response(status_code=404)
        if path == "mcp":
            assert (await request.json())["method"] == "tools/list"
        return found if isinstance(found, Response) else JSONResponse(found)

    async with served(app) as url:
        yield f"{url}/base"


@pytest.mark.parametrize("action", [BARE, CALL])
async def test_mcp_tools_are_the_tools_where_the_action_is_their_call(action: dict[str, Any]) -> None:
    async with server(metadata=METADATA, schema={"action": action}, mcp={"result": {"tools": [TOOL]}}) as url:
        listing = await list_tools(url, timeout_s=60.0)
    assert (listing.name, listing.has_mcp_tools) == ("Board", True)
    function = {"name": "look", "description": "", "parameters": {"type": "object"}}
    assert listing.schemas == [{"type": "function", "function": function}]


async def test_any_other_action_is_the_only_tool_also_beside_mcp_tools() -> None:
    async with server(metadata=METADATA, schema={"action": MOVE}, mcp={"result": {"tools": [TOOL]}}) as url:
        listing = await list_tools(url, timeout_s=60.0)
    assert not listing.has_mcp_tools
    (schema,) = listing.schemas
    assert schema["function"]["name"] == "step"
    parameters = {"type": "object", "properties": {"to": {"$ref": "#/$defs/Field"}}, "$defs": {}}
    assert schema["function"]["parameters"] == parameters


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({}, "/metadata answered 404"),
        ({"metadata": METADATA, "schema": {"detail": "?"}}, "missing required field `action`"),
        ({"metadata": {"name": ""}}, "/metadata answered"),
        ({"metadata": METADATA, "schema": {"action": BARE}, "mcp": NO_MCP}, "Environment does not support MCP"),
        ({"metadata": METADATA, "schema": {"action": BARE}, "mcp": {"result": {"tools": []}}}, "/mcp answered"),
        ({"metadata": METADATA, "schema": Response(b" " * (2 << 20))}, "/schema answered more than 1048576 bytes"),
        ({"metadata": METADATA, "schema": {"action": {"properties": None}}}, "TypeError"),
        ({"metadata": METADATA, "schema": {"action": {"properties": ["to"]}}}, "AttributeError"),
        ({"metadata": RedirectResponse("/base/other"), "other": METADATA}, "/metadata answered 307"),
        ({"metadata": METADATA, "schema": Response(b"[" * 100_000)}, "/schema"),
    ],
)
async def test_a_server_that_is_none_is_refused_with_what_to_do(answers: dict[str, Any], says: str) -> None:
    async with server(**answers) as url:
        with pytest.raises(
            UserError, match=f"environment_factory: the OpenEnv server {url} cannot be used: "
        ) as refused:
            await list_tools(url, timeout_s=60.0)
    assert says in str(refused.value)
    assert str(refused.value).endswith("the URL is what OpenEnv's clients take as base_url")


async def test_a_server_that_is_not_there_or_silent_is_refused() -> None:
    with pytest.raises(UserError, match="ConnectError"):
        await list_tools("http://127.0.0.1:9", timeout_s=60.0)
    with listening_socket("127.0.0.1", 0) as silent, pytest.raises(UserError, match="TimeoutError"):
        await list_tools(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5)
