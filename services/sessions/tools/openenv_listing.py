"""Asks an OpenEnv server for its environment's name and tools. It opens no session, so a full server answers, too.

GET /metadata             returns the name
GET /schema               returns the JSON schema of the environment's action
POST /mcp, tools/list     lists the MCP tools, if the action is the call of one
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import httpx
import msgspec

from shared.errors import UserError
from shared.user_code.error_text import describe

STEP = "step"
"""The tool of an environment without MCP tools. OpenEnv forbids MCP tools of this name."""
_AnswerT = TypeVar("_AnswerT")
_LIST_TOOLS = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
_MAX_ANSWER_BYTES = 1 << 20


class OpenEnvListing(msgspec.Struct, frozen=True):
    """The name of a server's environment, and its tools.

    Attributes:
        schemas: The JSON schemas of the tools, in OpenAI's format.
        has_mcp_tools: Whether the tools are MCP tools. If not, the only tool, ``step``, takes the environment's action.
    """

    name: str
    schemas: list[dict[str, Any]]
    has_mcp_tools: bool


async def list_tools(url: str, *, timeout_s: float) -> OpenEnvListing:
    """Ask an OpenEnv server for the name and the tools of its environment.

    Args:
        url: The server's URL, without a slash at the end.
        timeout_s: Deadline of all requests together, in seconds.

    Raises:
        UserError: The server cannot be used. The message says what to do.
    """
    try:
        async with asyncio.timeout(timeout_s), _http_client() as http:
            name = (await _asked(http, "GET", f"{url}/metadata", _Metadata)).name
            action = (await _asked(http, "GET", f"{url}/schema", _Schemas)).action
            if not _calls_mcp_tools(action):
                return OpenEnvListing(name, [_step(action)], has_mcp_tools=False)
            listed = await _asked(http, "POST", f"{url}/mcp", _Listed, body=_LIST_TOOLS)
            return OpenEnvListing(name, [tool.schema() for tool in listed.result.tools], has_mcp_tools=True)
    except (httpx.HTTPError, ValueError, TypeError, AttributeError, RecursionError, TimeoutError) as error:
        raise UserError(
            f"environment_factory: the OpenEnv server {url} cannot be used: {describe(error)}. See that it runs, and "
            "that the URL is what OpenEnv's clients take as base_url"
        ) from error


class _Metadata(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class _Schemas(msgspec.Struct):
    action: dict[str, Any]


class _Tool(msgspec.Struct):
    """An MCP tool in a server's list. Its schema has either of two names, depending on the release of the MCP SDK."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    camel_schema: dict[str, Any] | None = msgspec.field(default=None, name="inputSchema")

    def schema(self) -> dict[str, Any]:
        parameters = self.input_schema or self.camel_schema or {"type": "object", "properties": {}}
        return _function(self.name, self.description or "", parameters)


class _Tools(msgspec.Struct):
    tools: Annotated[list[_Tool], msgspec.Meta(min_length=1)]


class _Listed(msgspec.Struct):
    result: _Tools


def _http_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=None)


async def _asked(
    http: httpx.AsyncClient, method: str, url: str, kind: type[_AnswerT], *, body: object = None
) -> _AnswerT:
    async with http.stream(method, url, json=body, headers={"accept-encoding": "identity"}) as response:
        answer = b""
        async for part in response.aiter_raw():
            answer += part
            if len(answer) > _MAX_ANSWER_BYTES:
                raise ValueError(f"{url} answered more than {_MAX_ANSWER_BYTES} bytes")
    if not response.is_success:
        raise ValueError(f"{url} answered {response.status_code}")
    try:
        return msgspec.json.decode(answer, type=kind)
    except ValueError as error:
        raise ValueError(f"{url} answered {answer[:200]!r}: {error}") from error


def _calls_mcp_tools(action: Mapping[str, Any]) -> bool:
    """Whether an action's schema is the call of an MCP tool: OpenEnv's CallToolAction, or its base class Action."""
    schema = json.dumps(action)
    is_bare = set(action.get("properties", ())) == {"metadata"}
    return is_bare or ('"tool_name"' in schema and '"arguments"' in schema)


def _step(action: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the tool ``step``: its arguments are the fields of an action, without ``metadata``."""
    properties = {name: value for name, value in action.get("properties", {}).items() if name != "metadata"}
    fields = {key: value for key, value in action.items() if key not in ("title", "description")}
    return _function(STEP, action.get("description", ""), fields | {"properties": properties})


def _function(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}
