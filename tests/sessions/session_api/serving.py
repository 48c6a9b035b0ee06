"""The application of the sessions service on a port, with one served run."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest

from services.sessions.app import build_app
from services.sessions.open_sessions import OpenSessions
from services.sessions.session_api.client_errors import with_client_errors
from shared.access import entrance
from shared.access.keyring import Keyring
from shared.access.route_table import SESSIONS
from shared.run_options.agents import AgentOptions
from shared.serving.http_limits import HttpLimits
from shared.serving.http_server import HttpServer
from shared.serving.listening import listening_socket
from shared.turns import ChatMessage, SampledTurn, TurnRequest
from tests.eventually import eventually
from tests.plain_http import NO_TLS
from tests.sessions.scripted import ScriptedGenerators, assistant, user

openai = pytest.importorskip("openai")

KEY = "key-of-the-test"
QUESTION: list[Any] = [user("2+2?")]
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class HeldGenerators(ScriptedGenerators):
    """Generators that answer once the test lets them."""

    def __init__(self, policy: Callable[[TurnRequest], ChatMessage | SampledTurn]) -> None:
        super().__init__(policy)
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def sample(self, request: TurnRequest, *, routing_key: str) -> SampledTurn:
        turn = await super().sample(request, routing_key=routing_key)
        await self.may_answer.wait()
        return turn


class Service:
    """The application on a port, with one served run."""

    def __init__(self, url: str, sessions: OpenSessions, generators: HeldGenerators) -> None:
        self.url = url
        self.sessions = sessions
        self.generators = generators
        self.http = httpx.AsyncClient(
            base_url=url, headers={"authorization": f"Bearer {KEY}"}, trust_env=False, verify=NO_TLS, timeout=120
        )

    async def open(self, **more: Any) -> dict[str, Any]:
        opened = await self.http.post("/v1/sessions", json={"run_id": "run-test", **more})
        assert opened.status_code == 201, opened.text
        body: dict[str, Any] = opened.json()
        return body

    async def view(self, session: dict[str, Any]) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {session['api_key']}"}
        body: dict[str, Any] = (await self.http.get(session["base_url"], headers=headers)).json()
        return body

    def client(self, session: dict[str, Any], **more: Any) -> Any:
        return openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"], timeout=120, **more)


def number(request: TurnRequest) -> ChatMessage:
    """Answer with the number of requests so far; the test sees which turn it was given."""
    return assistant(str([message["role"] for message in request.messages].count("assistant")))


@contextlib.asynccontextmanager
async def serving(
    policy: Callable[[TurnRequest], ChatMessage | SampledTurn] = number,
    *,
    max_sessions: int = 8,
    max_turns: int = 64,
) -> AsyncGenerator[Service]:
    generators = HeldGenerators(policy)
    with listening_socket("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        sessions = OpenSessions(url=url, max_sessions=max_sessions, max_turns=max_turns)

        async def ready() -> None:
            return None

        async def no_tools(_: AgentOptions) -> list[dict[str, Any]]:
            return []

        app = build_app(why_not_ready=ready, check_tools=no_tools, replica_id="sessions-0", sessions=sessions)
        limits = HttpLimits()
        guarded = with_client_errors(
            entrance.guarded(app, routes=SESSIONS, keyring=Keyring(api=KEY, internal="internal"), limits=limits)
        )
        server = HttpServer(guarded, limits, drain_s=1)
        running = asyncio.create_task(server.serve(sockets=[listener]), name="serve sessions")
        await eventually(lambda: server.started)
        service = Service(url, sessions, generators)
        try:
            async with sessions.serving("run-test", generators, max_completion_length=100):
                yield service
        finally:
            await service.http.aclose()
            server.should_exit = True
            async with asyncio.timeout(120):
                await running
