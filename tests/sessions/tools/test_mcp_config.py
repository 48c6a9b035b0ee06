"""The file of MCP servers: its format, its variables, and what is said of a file that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.sessions.tools.mcp_config import HttpServer, StdioServer, read_mcp_servers
from shared.errors import UserError


def written(directory: Path, servers: dict[str, Any]) -> Path:
    path = directory / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


def test_a_file_as_other_programs_have_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_TOKEN", "s3cret")
    path = written(
        tmp_path,
        {
            "search": {
                "type": "http",
                "url": "https://a.example/mcp",
                "headers": {"Authorization": "Bearer ${SEARCH_TOKEN}"},
            },
            "clock": {"command": "uvx", "args": ["mcp-server-time"], "env": {"TZ": "UTC"}},
            "other": {"command": "${NOT_SET}"},
        },
    )
    assert read_mcp_servers(path, ["search", "clock"]) == {
        "search": HttpServer(url="https://a.example/mcp", headers={"Authorization": "Bearer s3cret"}),
        "clock": StdioServer(command="uvx", args=["mcp-server-time"], env={"TZ": "UTC"}),
    }
    assert read_mcp_servers(None, []) == {}


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ('{"mcpServers": {"one": {"command": "x"}}}', "two", "has no MCP server two; it has one"),
        ('{"mcpServers": {"one": {"command": "${NOT_SET}"}}}', "one", "one cannot be used: command: .*has no NOT_SET"),
        ('{"mcpServers": {"one": {"url": "not a url"}}}', "one", "one cannot be used: .*URL"),
        ('{"mcpServers": {"one": {"url": "http://h", "comand": "k3y"}}}', "one", "comand: Extra inputs"),
        ('{"mcpServers": {"one": {}}}', "one", "command: Field required"),
        ("{", "one", "cannot be used: Invalid JSON"),
        ("{}", "one", "mcpServers: Field required"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path, text: str, name: str, says: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as refused:
        read_mcp_servers(path, [name])
    assert "k3y" not in str(refused.value)


def test_without_a_file_it_is_said_how_to_give_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="set HEADRACE_MCP_CONFIG"):
        read_mcp_servers(None, ["one"])
    with pytest.raises(UserError, match="No such file"):
        read_mcp_servers(tmp_path / "none.json", ["one"])
