"""OpenEnv servers in processes of their own: real ones, and stand-ins that need none of OpenEnv's packages.

The real ones run with the Python that ``OPENENV_PYTHON`` names, which has ``openenv`` or ``openenv-core``. Their
packages cannot be installed beside ours: openenv 0.10.0 needs the MCP SDK below 2, and the sessions service 2.3.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from headrace.local.held_port import HeldPort
from services.sessions.tools.openenv_server import OpenEnvServer

PROGRAM = '''
import sys, time
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

class Guess(Action):
    """Guess the number."""
    number: int = Field(description="The guess.")

class Hint(Observation):
    hint: str
    guesses_left: int

class GameState(State):
    secret: int = 0

class Game(Environment[Guess, Hint, GameState]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = GameState()

    def reset(self, secret=None, seed=0, episode_id=None, **_):
        self._state = GameState(episode_id=episode_id, secret=seed % 10 if secret is None else secret)
        return Hint(hint="Guess a number from 0 to 9.", guesses_left=3)

    def step(self, action, timeout_s=None, **_):
        if action.number == 13:
            raise ValueError("13 is unlucky")
        if action.number == 99:
            time.sleep(600)
        self._state.step_count += 1
        left, right = 3 - self._state.step_count, action.number == self._state.secret
        hint = "right" if right else "higher" if action.number < self._state.secret else "lower"
        return Hint(hint=hint, guesses_left=left, reward=1.0 if right else 0.25 * left, done=right or left == 0)

    @property
    def state(self):
        return self._state

class Counter(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp, self._total, self._state = FastMCP("counter"), 0, State()

        @mcp.tool
        def add(number: int) -> str:
            """Add a number.

            Args:
                number: The number.
            """
            if number < 0:
                raise ValueError("only upwards")
            self._total += number
            return str(self._total)

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, start=0, **_):
        self._total, self._state = start, State(episode_id=episode_id)
        return Observation(metadata={"status": "ready"})

    async def step_async(self, action, timeout_s=None, **more):
        observation = await super().step_async(action, timeout_s=timeout_s, **more)
        self._state.step_count += 1
        observation.reward, observation.done = self._total / 10, self._total >= 10
        return observation

    def _step_impl(self, action, timeout_s=None, **_):
        raise TypeError("not a call of a tool")

    @property
    def state(self):
        return self._state

port, name, most = sys.argv[1:]
if name == "game":
    app = create_fastapi_app(Game, Guess, Hint, int(most))
else:
    app = create_fastapi_app(Counter, CallToolAction, CallToolObservation, int(most))
uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
'''
STAND_IN = [sys.executable, str(Path(__file__).with_name("openenv_stand_in.py"))]
SERVERS = [
    pytest.param(STAND_IN, id="stand-in"),
    pytest.param(
        [os.environ.get("OPENENV_PYTHON", ""), "-c", PROGRAM],
        id="real",
        marks=pytest.mark.skipif("OPENENV_PYTHON" not in os.environ, reason="needs OPENENV_PYTHON"),
    ),
]


@contextmanager
def openenv_server(
    program: list[str], name: str, *, max_sessions: int = 8
) -> Generator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a server with the environment ``game`` or ``counter``; yield its URL and its process once it answers."""
    with HeldPort() as port:
        port.let_bind()
        process = subprocess.Popen([*program, str(port.number), name, str(max_sessions)])
        try:
            deadline = time.monotonic() + 300.0
            while not _answers(port.url):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield port.url, process
        finally:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/metadata", trust_env=False, timeout=60.0).is_success
    except httpx.TransportError:
        return False


async def loaded(url: str, *, timeout_s: float = 60.0, wait_s: float = 60.0) -> OpenEnvServer:
    """Load a server as a run does."""
    return await OpenEnvServer.load(
        url, timeout_s=timeout_s, check_timeout_s=60.0, at_once=asyncio.Semaphore(4), wait_s=wait_s
    )


@asynccontextmanager
async def scripted_server(
    *answers: str | bytes,
    process_request: Callable[[ServerConnection, Request], Response | None] | None = None,
    at_end: Callable[[ServerConnection], Awaitable[object]] | None = None,
) -> AsyncGenerator[str]:
    """Answer the messages of each connection with these, then do ``at_end``, or hang up."""

    async def answered(connection: ServerConnection) -> None:
        for answer in answers:
            await connection.recv()
            await connection.send(answer)
        if at_end is not None:
            await at_end(connection)

    async with serve(answered, "127.0.0.1", 0, process_request=process_request) as serving:
        yield f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}"
