"""Server-sent events: replay, heartbeat, one final event, and no stream that outlives the service."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from services.trainer.run_api.trainer_api import TrainerApi, make_api
from services.trainer.settings import TrainerSettings
from shared.errors import UnavailableError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from tests.trainer.api_rig import serving, wait_until

Run = dict[str, Any]
Event = dict[str, str]


@pytest.fixture
async def run_id(client: httpx.AsyncClient, run: Run) -> str:
    """Return a submitted run."""
    return str((await client.post("/v1/runs", json=run)).json()["run"]["run_id"])


async def emit(redis: Redis, run_id: str, kind: str, **data: Any) -> str:
    """Write an event as a training rank does, and return its id."""
    entry: Any = await redis.xadd(RunKeys(run_id).events, {"kind": kind, "data": json.dumps(data)})
    return str(entry.decode())


async def events(lines: AsyncGenerator[str]) -> AsyncGenerator[Event]:
    """Parse an event stream; a comment is an event with the key ``comment``."""
    event: Event = {}
    async for line in lines:
        if line.startswith(":"):
            yield {"comment": line[1:].strip()}
        elif line:
            name, _, value = line.partition(": ")
            event[name] = value
        elif event:
            if "data" in event:
                yield event
            event = {}


async def test_a_stream_ends_in_order_while_redis_is_away(
    client: httpx.AsyncClient,
    api: TrainerApi,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reading = asyncio.create_task(read(client, run_id), name="watcher")
    await wait_until(lambda: api.streams.num_streams == 1)

    async def be_away(_: str) -> None:
        raise UnavailableError("reading the run record failed for 60 s")

    monkeypatch.setattr(api.store, "ending", be_away)
    assert await reading == []
    assert api.streams.num_streams == 0
    assert "Exception in ASGI application" not in caplog.text


async def read(
    client: httpx.AsyncClient, run_id: str, *, headers: dict[str, str] | None = None, count: int | None = None
) -> list[Event]:
    """Read ``count`` events, or all until the stream ends; comments are left out."""
    found: list[Event] = []
    async with asyncio.timeout(120), client.stream("GET", f"/v1/runs/{run_id}/events", headers=headers) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        async for event in events(reply.aiter_lines()):  # type: ignore[arg-type]
            if "comment" not in event:
                found.append(event)
            if len(found) == count:
                break
    return found


async def test_events_are_replayed_from_the_beginning_and_then_followed(
    client: httpx.AsyncClient, redis: Redis, run_id: str
) -> None:
    first = await emit(redis, run_id, "metrics", step=1)
    reading = asyncio.create_task(read(client, run_id, count=2), name="watcher")
    second = await emit(redis, run_id, "push", policy_version=1)
    assert await reading == [
        {"id": first, "event": "metrics", "data": '{"step": 1}'},
        {"id": second, "event": "push", "data": '{"policy_version": 1}'},
    ]


async def test_a_watcher_that_comes_back_misses_nothing_and_sees_nothing_twice(
    client: httpx.AsyncClient, redis: Redis, run_id: str
) -> None:
    ids = [await emit(redis, run_id, "metrics", step=step) for step in range(5)]
    seen = await read(client, run_id, count=2)
    rest = await read(client, run_id, headers={"Last-Event-ID": seen[-1]["id"]}, count=3)
    assert [event["id"] for event in seen + rest] == ids


async def test_more_events_than_a_batch_all_arrive_in_order(
    client: httpx.AsyncClient, redis: Redis, run_id: str
) -> None:
    for step in range(450):
        await emit(redis, run_id, "metrics", step=step)
    await RunStore(redis).set_status(run_id, "finished")
    steps = [json.loads(event["data"]).get("step") for event in await read(client, run_id)]
    assert steps == [*range(450), None]


async def test_the_stream_ends_with_how_the_run_ended(client: httpx.AsyncClient, redis: Redis, run_id: str) -> None:
    reading = asyncio.create_task(read(client, run_id), name="watcher")
    await emit(redis, run_id, "metrics", step=1)
    await RunStore(redis).set_status(run_id, "failed", reason="the reward function is gone")
    metrics, final = await reading
    assert metrics["event"] == "metrics"
    assert "id" not in final
    assert final["event"] == "status"
    assert json.loads(final["data"]) == {
        "run_id": run_id,
        "status": "failed",
        "reason": "the reward function is gone",
        "final": True,
    }


async def test_a_deleted_run_ends_its_streams(
    client: httpx.AsyncClient, api: TrainerApi, redis: Redis, run_id: str
) -> None:
    reading = asyncio.create_task(read(client, run_id), name="watcher")
    await wait_until(lambda: api.streams.num_streams == 1)
    await RunStore(redis).delete(run_id)
    final = (await reading)[-1]
    assert json.loads(final["data"])["status"] == "deleted"


async def test_silence_is_broken_by_heartbeats(client: httpx.AsyncClient, run_id: str) -> None:
    comments = 0
    async with asyncio.timeout(120), client.stream("GET", f"/v1/runs/{run_id}/events") as reply:
        async for event in events(reply.aiter_lines()):  # type: ignore[arg-type]
            comments += "comment" in event
            if comments == 2:
                break
    assert comments == 2, "the stream ended"


async def test_line_breaks_cannot_forge_an_event(client: httpx.AsyncClient, redis: Redis, run_id: str) -> None:
    forged: dict[Any, Any] = {"kind": "log\nevent: status", "data": 'x\n\nevent: status\ndata: {"final": true}'}
    await redis.xadd(RunKeys(run_id).events, forged)
    (event,) = await read(client, run_id, count=1)
    assert event["event"] == "logeventstatus"


@pytest.mark.parametrize("event_id", ["abc", "1", "-1-0", "99999999999999999999-0", "1-0-0"])
async def test_an_id_this_stream_never_sent_is_a_400(client: httpx.AsyncClient, run_id: str, event_id: str) -> None:
    reply = await client.get(f"/v1/runs/{run_id}/events", headers={"Last-Event-ID": event_id})
    assert reply.status_code == 400
    assert reply.json()["title"] == "Bad event id"


async def test_streams_end_when_the_service_stops(
    client: httpx.AsyncClient, api: TrainerApi, redis: Redis, run_id: str
) -> None:
    reading = asyncio.create_task(read(client, run_id), name="watcher")
    await wait_until(lambda: api.streams.num_streams == 1)
    api.stopping.set()
    assert await reading == []
    assert api.streams.num_streams == 0


async def test_one_watcher_too_many_is_refused_and_a_closed_stream_frees_a_place(
    settings: TrainerSettings, redis: Redis, run: Run
) -> None:
    narrow = settings.model_copy(update={"max_event_streams": 1})
    api = make_api(narrow, redis, stopping=asyncio.Event())
    async with serving(api) as client:
        run_id = (await client.post("/v1/runs", json=run)).json()["run"]["run_id"]
        async with client.stream("GET", f"/v1/runs/{run_id}/events"):
            await wait_until(lambda: api.streams.num_streams == 1)
            refused = await client.get(f"/v1/runs/{run_id}/events")
            assert refused.status_code == 503
            assert "HEADRACE_MAX_EVENT_STREAMS" in refused.json()["detail"]
        await wait_until(lambda: api.streams.num_streams == 0)


async def test_of_watchers_that_come_at_once_no_more_are_let_in_than_there_are_places(
    settings: TrainerSettings, redis: Redis, run: Run
) -> None:
    api = make_api(settings.model_copy(update={"max_event_streams": 4}), redis, stopping=asyncio.Event())
    async with serving(api) as client:
        run_id = (await client.post("/v1/runs", json=run)).json()["run"]["run_id"]
        statuses: list[int] = []

        async def watch() -> None:
            async with client.stream("GET", f"/v1/runs/{run_id}/events") as reply:
                statuses.append(reply.status_code)
                await wait_until(lambda: len(statuses) == 24)

        async with asyncio.timeout(120):
            await asyncio.gather(*(watch() for _ in range(24)))
    assert sorted(statuses) == [200] * 4 + [503] * 20
