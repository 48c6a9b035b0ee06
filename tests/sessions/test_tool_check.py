"""POST /v1/tools/check of a real service: tools are imported in processes of their own, whatever they do there."""

import contextlib
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from services.sessions import run_follower
from services.sessions.service import SessionsService
from services.sessions.settings import SessionsSettings
from shared.serving.http_limits import HttpLimits

KEY = "a-key-for-tests"
TOOLS = '''
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

def untyped(a) -> int:
    """Return a number.

    Args:
        a: The number.
    """
    return a

def undocumented(a: int) -> int:
    return a
'''

BAD_BODIES: list[tuple[Any, int, str]] = [
    ({"tools": "my_tools:add"}, 422, "tools must be a list"),
    ({"tools": ["my_tools:add"] * 2}, 422, "my_tools:add is listed twice"),
    ({"tool": []}, 422, "tool "),
    ([], 422, "the body "),
    ({"tools": [[]] * 1000}, 422, "more than 1000 arrays"),
]


ENVIRONMENTS = """
import pathlib, time

class Slow:
    def __init__(self):
        time.sleep(600)

class Meeting:
    name, other = "a", "b"

    def __init__(self):
        here = pathlib.Path(__file__).parent
        (here / self.name).touch()
        while not (here / self.other).exists():
            time.sleep(0.01)

    def reset(self, **_):
        pass

class Other(Meeting):
    name, other = "b", "a"
"""
MEETING_SERVER = """
import pathlib, runpy, sys, time
mine, other, sys.argv = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
mine.touch()
while not other.exists():
    time.sleep(0.01)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of a service that no run has used yet. Its Redis is away."""
    async with client_of(tmp_path) as found:
        yield found


@contextlib.asynccontextmanager
async def client_of(tmp_path: Path, **more: Any) -> AsyncGenerator[httpx.AsyncClient]:
    (tmp_path / "my_envs.py").write_text(ENVIRONMENTS)
    (tmp_path / "my_tools.py").write_text(TOOLS)
    (tmp_path / "other_tools.py").write_text("from my_tools import add\n")
    (tmp_path / "broken_tools.py").write_text("import no_such_package\n")
    (tmp_path / "deadly_tools.py").write_text("import os\nos._exit(3)\n")
    options: dict[str, Any] = {"tool_path": (tmp_path,), "num_tool_workers": 1, "check_timeout_s": 240.0, **more}
    settings = SessionsSettings(api_key=SecretStr(KEY), **options)
    service = SessionsService(settings)
    app = service.guarded(settings.keyring(), HttpLimits())
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app),
        base_url="http://sessions",
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=300,
    ) as found:
        yield found
    await service.close()


async def check(client: httpx.AsyncClient, *tools: str, **more: Any) -> httpx.Response:
    return await client.post("/v1/tools/check", json={"tools": list(tools), **more})


async def refusal(client: httpx.AsyncClient, *tools: str, **more: Any) -> str:
    """Return the sentence with which tools are refused."""
    reply = await check(client, *tools, **more)
    assert (reply.status_code, reply.json()["title"]) == (422, "Unusable tools"), reply.text
    return str(reply.json()["detail"])


async def test_tools_that_can_be_used_are_answered_with_what_the_model_sees(client: httpx.AsyncClient) -> None:
    reply = await check(client, "my_tools:add", tool_timeout_s=5.0, max_tool_calling_iterations=3)
    assert reply.status_code == 200, reply.text
    (schema,) = reply.json()["tools"]
    assert schema["function"]["name"] == "add"
    assert schema["function"]["parameters"]["required"] == ["a"]


async def test_every_tool_that_cannot_be_used_is_named_with_what_to_do(client: httpx.AsyncClient) -> None:
    said = await refusal(
        client, "my_tools:add", "my_tools:untyped", "my_tools:undocumented", "my_tools:missing", "broken_tools:add"
    )
    assert "my_tools:add" not in said
    assert "my_tools:untyped cannot be a tool: " in said
    assert "my_tools:undocumented cannot be a tool: " in said
    assert said.count("give each argument a type hint, and write a docstring in Google's format") == 2
    assert "missing" in said
    assert "no_such_package" in said


async def test_two_tools_of_one_name_are_refused(client: httpx.AsyncClient) -> None:
    said = await refusal(client, "my_tools:add", "other_tools:add")
    assert said.startswith("2 tools are called add, and the model could not tell them apart")


async def test_a_module_that_ends_its_process_ends_nothing_else(client: httpx.AsyncClient) -> None:
    assert "deadly_tools ended its process" in await refusal(client, "deadly_tools:add")
    assert (await check(client, "my_tools:add")).status_code == 200


async def test_an_environment_that_is_made_too_slowly_is_refused_with_this_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_follower, "_GRACE_S", 120.0)
    async with client_of(tmp_path, check_timeout_s=3.0) as client:
        said = await refusal(client, environment_factory="my_envs:Slow")
    assert said == "importing my_envs and making a Slow took longer than 3 s"


async def test_a_check_that_has_to_wait_for_others_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_follower, "_MAX_CHECKS", 0)
    async with client_of(tmp_path, check_timeout_s=0.1) as client:
        said = await refusal(client, "my_tools:add")
    assert said.startswith("checking these took longer than 0.1 s, with the wait for other checks: ")


async def test_several_environments_are_made_at_the_same_time(tmp_path: Path) -> None:
    async with client_of(tmp_path, check_timeout_s=20.0) as client:
        reply = await check(client, environment_factory={"one": "my_envs:Meeting", "other": "my_envs:Other"})
    assert reply.status_code == 200, reply.text


async def test_several_mcp_servers_are_connected_at_the_same_time(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    program, names = str(Path(__file__).parent / "tools" / "broken_mcp_server.py"), [str(tmp_path / at) for at in "cd"]
    servers = {
        Path(mine).name: {"command": sys.executable, "args": ["-c", MEETING_SERVER, mine, other, program, "listing"]}
        for mine, other in (names, names[::-1])
    }
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    async with client_of(tmp_path, check_timeout_s=20.0, mcp_config=tmp_path / "mcp.json") as client:
        reply = await check(client, mcp_servers=["c", "d"])
    assert "have a tool" in reply.json()["detail"], reply.text


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    BAD_BODIES,
)
async def test_a_body_that_is_not_options_of_agents_is_refused(
    client: httpx.AsyncClient, body: Any, status: int, sentence: str
) -> None:
    reply = await client.post("/v1/tools/check", json=body)
    assert (reply.status_code, reply.json()["title"]) == (status, "Invalid request")
    assert sentence in reply.json()["detail"]


async def test_a_body_that_is_not_json_is_refused(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/tools/check", content="tools", headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.json()["title"]) == (400, "Malformed JSON")
    assert (await client.post("/v1/tools/check", content="tools")).status_code == 415


async def test_the_check_needs_the_key(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/tools/check", json={"tools": []}, headers={"Authorization": "Bearer other"})
    assert reply.status_code == 401
