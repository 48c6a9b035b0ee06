"""The list of runs by status and name, in pages that do not miss or repeat a run."""

from typing import Any

import httpx
import pytest

from services.trainer.run_api.listing import run_listing, run_sorting
from shared.pause import Pause
from shared.redis.redis_connection import Redis
from shared.redis.run_record import Progress, Status
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


@pytest.mark.parametrize("limit", [1, 2, 100])
@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("created", ["queued", "running", "paused", "stopped", "failed", "finished"]),
        ("status", ["failed", "finished", "paused", "queued", "running", "stopped"]),
        ("step", ["paused", "failed", "queued", "running", "stopped", "finished"]),
        ("name", ["running", "stopped", "finished", "queued", "paused", "failed"]),
        ("started", ["running", "paused", "queued", "stopped", "failed", "finished"]),
        ("ended", ["stopped", "failed", "finished", "queued", "running", "paused"]),
    ],
)
async def test_runs_are_sorted_in_pages(
    client: httpx.AsyncClient, runs: dict[str, str], redis: Redis, sort: str, order: list[str], limit: int
) -> None:
    store = RunStore(redis)
    await store.write_progress(runs["paused"], Progress(step=7))
    await store.write_progress(runs["failed"], Progress(step=3))
    assert await listed(client, sort=sort, limit=limit) == [runs[status] for status in order]


async def test_a_sorted_list_takes_filters(client: httpx.AsyncClient, runs: dict[str, str]) -> None:
    found = await listed(client, sort="status", name="even", limit=1)
    assert found == [runs["finished"], runs["running"], runs["stopped"]]
    assert await listed(client, sort="name", status=["queued", "finished"]) == [runs["finished"], runs["queued"]]


async def test_a_cursor_belongs_to_its_order(client: httpx.AsyncClient, runs: dict[str, str]) -> None:
    assert runs
    by_name = (await client.get("/v1/runs", params={"sort": "name", "limit": 1})).json()["next_cursor"]
    for sort in ("created", "status", "step"):
        reply = await client.get("/v1/runs", params={"sort": sort, "cursor": by_name})
        assert (reply.status_code, reply.json()["title"]) == (400, "Bad cursor")


async def test_more_runs_than_can_be_sorted_are_refused(
    client: httpx.AsyncClient, runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_sorting, "MAX_SORTED", 5)
    reply = await client.get("/v1/runs", params={"sort": "name"})
    assert (reply.status_code, reply.json()["title"]) == (422, "Too many runs to sort")
    assert await listed(client, sort="name", status="failed") == [runs["failed"]]


async def test_an_unknown_order_is_refused_and_the_known_ones_are_named(client: httpx.AsyncClient) -> None:
    reply = await client.get("/v1/runs", params={"sort": "colour"})
    assert reply.status_code == 422
    for sort in ("created", "started", "ended", "name", "status", "step"):
        assert sort in reply.json()["detail"]
