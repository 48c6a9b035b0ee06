"""Building blocks for tests of the run API: a tiny rewarder, the API on a real port, and a way to wait."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncGenerator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from services.trainer.run_api.service import http_server
from services.trainer.run_api.trainer_api import TrainerApi, make_api
from services.trainer.settings import TrainerSettings
from shared.redis.redis_connection import Redis
from tests.plain_http import NO_TLS

KEY = "a-key-for-tests"
INTERNAL_KEY = "an-internal-key-for-tests"


class DatasetFile:
    """A JSONL file with ten usable rows, which a test may rewrite."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.good_rows = "".join(f'{{"prompt": "{n} + 1 =", "solution": "{n + 1}"}}\n' for n in range(10))
        self.write(self.good_rows)

    def write(self, text: str) -> None:
        """Replace all rows."""
        self.path.write_text(text)


class FakeChecker:
    """Answers POST to any path, as a service that checks a part of a run."""

    def __init__(self) -> None:
        checker = self
        self.status = 200
        self.keys_seen: list[str] = []
        self.bodies_seen: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                checker.keys_seen.append(self.headers["Authorization"])
                checker.bodies_seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                status, answer = checker.status, {"title": "Broken", "detail": "broken for this test"}
                if status == 200:
                    status, answer = checker.answer(checker.bodies_seen[-1])
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="fake checker", daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and body of the answer to a request with this body."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=120)


class FakeRewarder(FakeChecker):
    """Answers like the rewarder: it knows ``accuracy_reward``, which needs a solution."""

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """See FakeChecker."""
        unknown = [name for name in body["reward_funcs"] if name != "accuracy_reward" and not name.endswith(":brevity")]
        if unknown:
            sentence = f"unknown reward function {unknown[0]}; built in is accuracy_reward"
            errors = [{"field": "reward_funcs", "message": sentence}]
            return 422, {"title": "Unknown reward", "status": 422, "detail": sentence, "errors": errors}
        known = {"name": "accuracy_reward", "kind": "built-in", "summary": "", "required_columns": [["solution"]]}
        return 200, {"reward_funcs": [known]}


class FakeSessions(FakeChecker):
    """Answers like the sessions service: it knows ``my_tools:add``."""

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """See FakeChecker."""
        tools = body.get("tools", [])  # a run has them, an environment or an agent
        unknown = [name for name in tools if name != "my_tools:add"]
        if unknown or not tools:
            what = f"{unknown[0]} cannot be a tool: no docstring" if unknown else "only tools are known here"
            return 422, {"title": "Unusable tools", "status": 422, "detail": what}
        return 200, {"tools": [{}]}


@contextlib.asynccontextmanager
async def serving(api: TrainerApi) -> AsyncGenerator[httpx.AsyncClient]:
    """Serve the API on a free port, and yield a client that has the key."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = http_server(api)
        task = asyncio.create_task(server.serve(sockets=[listener]), name="run API under test")
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(
                base_url=url,
                headers={"Authorization": f"Bearer {KEY}"},
                timeout=120,
                trust_env=False,
                verify=NO_TLS,
            ) as client:
                await wait_until(lambda: server.started)
                yield client
        finally:
            api.stopping.set()
            server.should_exit = True
            async with asyncio.timeout(120):
                await task


async def wait_until(is_true: Any, *, timeout_s: float = 120.0) -> None:
    """Wait for a condition, which is a function or a coroutine function; fail if it does not become true in time."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = is_true()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def supervising(settings: TrainerSettings, redis: Redis) -> AsyncGenerator[TrainerApi]:
    """Supervise runs, and stop as the service does, so that every test also tests the stop."""
    api = make_api(settings, redis, stopping=asyncio.Event())
    task = asyncio.create_task(api.supervisor.supervise(), name="supervisor under test")
    try:
        yield api
    finally:
        api.stopping.set()
        async with asyncio.timeout(120):
            await task
        assert api.supervisor.keeper.rank is None
