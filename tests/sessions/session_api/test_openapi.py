"""Schemathesis against the sessions service: every response matches its OpenAPI document."""

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
from tests.conftest import RedisServer
from tests.eventually import eventually
from tests.http.service_process import KEY, ServiceProcess
from tests.schema_check import check_schema
from tests.sessions.fake_generators import generator
from tests.sessions.replica import begin_run, service
from tests.sessions.scripted import answer, assistant

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis"),
    pytest.mark.timeout(900),
]
SESSION_ROUTES = (
    "get_session",
    "list_session_models",
    "create_session_chat_completion",
    "create_session_response",
    "create_session_message",
    "create_session_v1_message",
    "count_message_tokens",
    "count_v1_message_tokens",
    "report_session_reward",
    "end_session",
)
TOOL = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
'''


async def open_session(process: ServiceProcess) -> dict[str, Any]:
    opened: list[httpx.Response] = []

    async def is_open() -> bool:
        assert process.is_alive(), process.log()
        async with process.client() as client:
            opened.append(await client.post("/v1/sessions", json={"run_id": "run-test", "deadline_s": 3600}))
        return opened[-1].is_success

    await eventually(is_open)
    body: dict[str, Any] = opened[-1].json()
    return body


def of_session(session: dict[str, Any]) -> str:
    """Return the configuration that makes schemathesis use this session and its key."""
    return f"""
[[operations]]
include-operation-id = {json.dumps(SESSION_ROUTES)}
headers = {{ Authorization = "Bearer {session["api_key"]}" }}
parameters = {{ "path.session_id" = "{session["id"]}" }}
"""


@pytest.mark.slow
async def test_every_answer_is_one_that_the_openapi_document_promises(
    redis: Redis, redis_server: RedisServer, run_config: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "my_tools.py").write_text(TOOL)
    async with generator(redis, RunKeys("run-test"), lambda request: answer(request, assistant("4"))) as sampled:
        with service(redis_server.url, tmp_path, HEADRACE_MAX_OPEN_SESSIONS="4") as process:
            await begin_run(redis, run_config, tools=["my_tools:add"])
            session = await open_session(process)
            url, more = f"http://127.0.0.1:{process.port}", of_session(session)
            # An ended session answers only that it is over, so the session is ended in a second round.
            await asyncio.to_thread(check_schema, url, KEY, tmp_path, more_config=more, without=["end_session"])
            assert sampled.requests, "no request got as far as a turn"
            await asyncio.to_thread(check_schema, url, KEY, tmp_path, more_config=more)
            assert process.is_alive()
            assert "Traceback" not in process.log()
