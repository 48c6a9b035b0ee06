"""Submitting a run with tools: the sessions service imports them, and its sentences are the run's errors."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.redis.keys import RUNS
from shared.redis.redis_connection import Redis
from tests.trainer.api_rig import KEY, FakeSessions
from tests.trainer.submit_checks.test_submit import refusal

Run = dict[str, Any]


@pytest.fixture
def with_tools(run: Run, model_dir: Path) -> Run:
    """Return the body of a valid run with a tool."""
    (model_dir / "chat_template.jinja").write_text("{{ messages }}")
    return run | {"tools": ["my_tools:add"], "prompt_as_message": True}


@pytest.mark.parametrize("params", [{}, {"dry_run": "1"}])
async def test_the_sessions_service_is_asked_for_the_tools_with_the_key_and_what_the_user_has_set(
    client: httpx.AsyncClient, with_tools: Run, sessions: FakeSessions, params: dict[str, str]
) -> None:
    reply = await client.post("/v1/runs", params=params, json=with_tools | {"tool_timeout_s": 5.0})
    assert reply.is_success, reply.text
    assert sessions.keys_seen == [f"Bearer {KEY}"]
    assert sessions.bodies_seen == [{"tools": ["my_tools:add"], "tool_timeout_s": 5.0}]


async def test_a_run_without_tools_needs_no_sessions_service(
    client: httpx.AsyncClient, run: Run, sessions: FakeSessions
) -> None:
    sessions.close()
    assert (await client.post("/v1/runs", json=run)).status_code == 202
    assert sessions.bodies_seen == []


@pytest.mark.parametrize("params", [{}, {"dry_run": "1"}])
async def test_a_tool_that_cannot_be_used_is_refused_with_the_services_sentence_among_all_errors(
    client: httpx.AsyncClient, with_tools: Run, params: dict[str, str], redis: Redis
) -> None:
    wrong = with_tools | {"tools": ["my_tools:divide"], "reward_funcs": ["no_such_reward"]}
    reply = await client.post("/v1/runs", params=params, json=wrong)
    assert reply.status_code == 422
    errors = {error["field"]: error["message"] for error in reply.json()["errors"]}
    assert errors["tools"] == "my_tools:divide cannot be a tool: no docstring"
    assert errors["reward_funcs"].startswith("unknown reward function")
    assert await redis.zcard(RUNS) == 0


async def test_tools_are_also_checked_if_a_path_of_the_run_is_refused(
    client: httpx.AsyncClient, with_tools: Run
) -> None:
    errors = await refusal(client, with_tools | {"tools": ["my_tools:divide"], "dataset_name": "/etc/passwd.jsonl"})
    assert errors.keys() == {"tools", "dataset_name"}


async def test_a_sessions_service_that_is_away_is_a_503_that_says_what_to_do(
    client: httpx.AsyncClient, with_tools: Run, sessions: FakeSessions, redis: Redis
) -> None:
    sessions.close()
    reply = await client.post("/v1/runs", json=with_tools)
    assert reply.status_code == 503
    assert reply.json()["type"] == "/problems/sessions-service-unavailable"
    assert reply.json()["detail"].startswith(
        f"The tools could not be checked: the sessions service at {sessions.url}/v1/tools/check cannot be used: "
    )
    assert "HEADRACE_SESSIONS_URL to the address of a running sessions service" in reply.json()["detail"]
    assert await redis.zcard(RUNS) == 0


@pytest.mark.parametrize(
    ("status", "sentence"),
    [(401, "same HEADRACE_API_KEY"), (403, "gives this trainer: broken for this test"), (404, "it answered 404")],
)
async def test_a_sessions_service_that_cannot_answer_is_a_503_that_says_why(
    client: httpx.AsyncClient, with_tools: Run, sessions: FakeSessions, status: int, sentence: str
) -> None:
    sessions.status = status
    reply = await client.post("/v1/runs", json=with_tools)
    assert reply.status_code == 503
    assert sentence in reply.json()["detail"]
