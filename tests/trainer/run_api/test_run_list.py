"""The list of runs by status and name, in pages that do not miss or repeat a run."""

from typing import Any

import httpx
import pytest

from services.trainer.run_api import run_listing
from shared.pause import Pause
from shared.redis.redis_connection import Redis
from shared.redis.run_record import Status
from shared.redis.run_store import RunStore
from tests.trainer.run_api.submitting import submit

Run = dict[str, Any]


async def listed(client: httpx.AsyncClient, **params: Any) -> list[str]:
    """Return the ids of all pages."""
    found: list[str] = []
    while True:
        reply = await client.get("/v1/runs", params=params)
        assert reply.status_code == 200, reply.text
        page = reply.json()
        assert len(page["runs"]) <= params.get("limit", 100)
        found += [run["run_id"] for run in page["runs"]]
        if page["next_cursor"] is None:
            return found
        params["cursor"] = page["next_cursor"]


@pytest.fixture
async def runs(client: httpx.AsyncClient, run: Run, redis: Redis) -> dict[str, str]:
    """Create a run of each status, oldest first; return their ids by status."""
    statuses: tuple[Status, ...] = ("finished", "failed", "stopped", "paused", "running", "queued")
    made: dict[str, str] = {}
    store = RunStore(redis)
    for number, status in enumerate(statuses):
        made[status] = await submit(client, run, "odd" if number % 2 else "even")
        if status == "paused":
            await store.set_status(made[status], "running")
            await store.write_pause(made[status], Pause(by="user", since_s=1.0, reason="asked"))
        elif status != "queued":
            await store.set_status(made[status], status)
    return made


async def test_runs_are_found_by_status(client: httpx.AsyncClient, runs: dict[str, str]) -> None:
    for status, run_id in runs.items():
        assert await listed(client, status=status) == [run_id]
    assert await listed(client, status=["running", "queued"]) == [runs["queued"], runs["running"]]
    assert await listed(client, status=["finished", "queued"]) == [runs["queued"], runs["finished"]]


async def test_runs_are_found_by_name(client: httpx.AsyncClient, runs: dict[str, str]) -> None:
    assert await listed(client, name="even") == [runs["running"], runs["stopped"], runs["finished"]]
    assert await listed(client, name="odd", status="paused") == [runs["paused"]]
    assert await listed(client, name="nobody") == []


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_pages_of_a_filtered_list_miss_no_run_and_repeat_none(
    client: httpx.AsyncClient, runs: dict[str, str], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_listing, "_AT_ONCE", 2)
    monkeypatch.setattr(run_listing, "_MAX_LOOKED_AT", 2)
    newest_first = [*runs.values()][::-1]
    assert await listed(client, limit=limit) == newest_first
    assert await listed(client, limit=limit, name="even") == newest_first[1::2]
    assert await listed(client, limit=limit, status=["queued", "paused"]) == [runs["queued"], runs["paused"]]
    assert await listed(client, limit=limit, status=["failed"]) == [runs["failed"]]


async def test_an_unknown_status_is_refused_and_the_known_ones_are_named(client: httpx.AsyncClient) -> None:
    reply = await client.get("/v1/runs", params={"status": ["queued", "canary"]})
    assert reply.status_code == 422
    assert reply.json()["errors"][0]["field"] == "status.1"
    for status in ("queued", "running", "paused", "finished", "stopped", "failed"):
        assert status in reply.json()["detail"]
    assert "canary" not in reply.text
