"""Reads the MCP servers that runs may use from the operator's file, which has the format of `.mcp.json`.

    {"mcpServers": {"search": {"type": "http", "url": "https://search.internal/mcp",
                               "headers": {"Authorization": "Bearer ${SEARCH_TOKEN}"}},
                    "clock": {"command": "uvx", "args": ["mcp-server-time"]}}}

A run names servers of this file, so that submitting a run neither starts another program nor reaches another host.
``${NAME}`` stands for a variable of the service's environment.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, HttpUrl, TypeAdapter, ValidationError

from shared.errors import UserError

_VARIABLE = re.compile(r"\$\{(\w+)\}")


def _expanded(text: str) -> str:
    missing = sorted({name for name in _VARIABLE.findall(text) if name not in os.environ})
    if missing:
        raise ValueError(f"the environment has no {', '.join(missing)}")
    return _VARIABLE.sub(lambda match: os.environ[match[1]], text)


_Text = Annotated[str, AfterValidator(_expanded)]


class _Server(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class HttpServer(_Server):
    """The address of an MCP server that is reached over streamable HTTP, and the headers of its requests."""

    type: Literal["http", "streamable-http"] = "http"
    url: _Text
    headers: dict[str, _Text] = {}

    def model_post_init(self, _: object) -> None:
        """Check that the URL is valid once its ``${NAME}`` variables are replaced."""
        TypeAdapter(HttpUrl).validate_python(self.url)


class StdioServer(_Server):
    """An MCP server started as a process for each run. It inherits only HOME, PATH and the like, and gets ``env``."""

    type: Literal["stdio"] = "stdio"
    command: Annotated[_Text, Field(min_length=1)]
    args: list[_Text] = []
    env: dict[str, _Text] = {}
    cwd: _Text | None = None


McpServer = HttpServer | StdioServer


class _File(BaseModel):
    servers: dict[str, dict[str, Any]] = Field(alias="mcpServers")


def read_mcp_servers(path: Path | None, names: list[str]) -> dict[str, McpServer]:
    """Read the file as it is now, and return its servers with these names, by name. Without names, read nothing.

    Raises:
        UserError: The file is not configured, cannot be read, or lacks one of the servers, or a server is malformed.
    """
    if not names:
        return {}
    if path is None:
        raise UserError(
            f"mcp_servers names {', '.join(names)}, and this service knows no MCP servers: set HEADRACE_MCP_CONFIG to "
            'the path of a JSON file with {"mcpServers": {"NAME": {"url": ...} or {"command": ...}}}'
        )
    try:
        servers = _File.model_validate_json(path.read_bytes()).servers
    except (OSError, ValidationError) as error:
        raise UserError(f"HEADRACE_MCP_CONFIG: {path} cannot be used: {_why(error)}") from error
    missing = [name for name in names if name not in servers]
    if missing:
        raise UserError(
            f"{path} has no MCP server {', '.join(missing)}; it has {', '.join(sorted(servers)) or 'none'}: correct "
            "mcp_servers, or add the server to the file"
        )
    return {name: _server(path, name, servers[name]) for name in names}


def _server(path: Path, name: str, fields: Mapping[str, Any]) -> McpServer:
    kind = HttpServer if "url" in fields else StdioServer
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise UserError(f"{path}: MCP server {name} cannot be used: {_why(error)}") from error


def _why(error: OSError | ValidationError) -> str:
    """Return the reason of an error without the file's values, because some of them are secret."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "; ".join(
        f"{'.'.join(map(str, found['loc']))}: {found['msg']}".removeprefix(": ")
        for found in error.errors(include_url=False, include_context=False, include_input=False)
    )
