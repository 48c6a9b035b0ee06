"""A submit that is sent twice leads to one run."""

import asyncio
import time
from typing import Any, cast

import httpx
import msgspec
import pytest
from redis.exceptions import OutOfMemoryError

from services.trainer.run_api.trainer_api import TrainerApi, make_api
from services.trainer.settings import TrainerSettings
from shared.errors import NoRoomError
from shared.redis.keys import RUNS, SUBMIT
from shared.redis.redis_connection import Redis
from shared.redis.run_record import RunRecord
from tests.eventually import eventually
from tests.trainer.api_rig import DatasetFile, FakeRewarder, serving

Run = dict[str, Any]
KEYED = {"Idempotency-Key": "6f1c"}


async def test_the_same_key_with_the_same_body_gives_the_same_answer_and_one_run(
    client: httpx.AsyncClient, redis: Redis, run: Run
) -> None:
    first = await client.post("/v1/runs", json=run, headers=KEYED)
    second = await client.post("/v1/runs", json=run, headers=KEYED)
    assert (first.status_code, second.status_code) == (202, 202)
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert first.json() == second.json()
    assert first.headers["location"] == second.headers["location"]
    assert await redis.zcard(RUNS) == 1


async def test_the_same_key_with_another_body_is_refused(client: httpx.AsyncClient, redis: Redis, run: Run) -> None:
    await client.post("/v1/runs", json=run, headers=KEYED)
    reply = await client.post("/v1/runs", json=run | {"seed": 7}, headers=KEYED)
    assert reply.status_code == 422
    assert reply.json()["title"] == "Idempotency key reused"
    assert await redis.zcard(RUNS) == 1


async def test_a_submit_that_redis_had_no_room_for_gives_its_key_back(
    client: httpx.AsyncClient, api: TrainerApi, redis: Redis, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has room only for the claim. The claim is released, so a repeated submit is accepted."""

    async def no_room(*_: Any, **__: Any) -> None:
        raise NoRoomError("writing the run failed: Redis is full")

    with monkeypatch.context() as patch:
        patch.setattr(api.store, "create", no_room)
        refused = await client.post("/v1/runs", json=run, headers=KEYED)
    assert (refused.status_code, refused.json()["detail"]) == (503, "writing the run failed: Redis is full")
    assert (await client.post("/v1/runs", json=run, headers=KEYED)).status_code == 202
    assert await redis.zcard(RUNS) == 1


@pytest.mark.parametrize("refused", ["xgroup_create", "zadd", "hset"])
async def test_a_run_that_found_no_room_half_way_leaves_nothing_behind(
    client: httpx.AsyncClient, api: TrainerApi, redis: Redis, run: Run, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    with monkeypatch.context() as patch:
        fail(patch, api.redis, refused, from_call=2 if refused == "xgroup_create" else 1)
        first = await client.post("/v1/runs", json=run, headers=KEYED)
    assert first.status_code == 503
    assert "Redis is full" in first.json()["detail"]
    assert await redis.keys("headrace:{*") == []
    assert await redis.zcard(RUNS) == 0
    assert list(api.settings.runs_dir.iterdir()) == []
    assert (await client.post("/v1/runs", json=run, headers=KEYED)).status_code == 202
    assert await redis.zcard(RUNS) == 1


async def test_a_run_that_was_written_before_redis_was_full_is_answered_and_made_once(
    client: httpx.AsyncClient, api: TrainerApi, redis: Redis, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the last write is lost, and the repeated write finds no room."""
    with monkeypatch.context() as patch:
        fail(patch, api.redis, "hset", loses_first_answer=True)
        first = await client.post("/v1/runs", json=run, headers=KEYED)
    again = await client.post("/v1/runs", json=run, headers=KEYED)
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json()["run"]["run_id"] == again.json()["run"]["run_id"]
    assert await redis.zcard(RUNS) == 1


async def test_a_run_whose_answer_found_no_room_is_answered_and_made_once(
    client: httpx.AsyncClient, api: TrainerApi, redis: Redis, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail(patch, api.redis, "set", from_call=2)  # the first claims the key
        first = await client.post("/v1/runs", json=run, headers=KEYED)
    assert first.status_code == 202
    assert (await client.post("/v1/runs", json=run, headers=KEYED)).status_code == 409
    await rewrite_claim(redis, claimed_at_s=0.0)
    again = await client.post("/v1/runs", json=run, headers=KEYED)
    assert again.json()["run"]["run_id"] == first.json()["run"]["run_id"]
    assert await redis.zcard(RUNS) == 1


async def test_a_half_made_run_that_cannot_be_removed_keeps_its_key(
    client: httpx.AsyncClient, api: TrainerApi, redis: Redis, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with a full disk does not delete anything either. The run is repaired under the same id."""
    with monkeypatch.context() as patch:
        fail(patch, api.redis, "hset")
        fail(patch, api.redis, "zrem")
        assert (await client.post("/v1/runs", json=run, headers=KEYED)).status_code == 503
    (half_made,) = cast("list[bytes]", await redis.zrange(RUNS, 0, -1))
    await rewrite_claim(redis, claimed_at_s=0.0)
    again = await client.post("/v1/runs", json=run, headers=KEYED)
    assert again.json()["run"]["run_id"] == half_made.decode()


async def test_a_claim_that_was_carried_on_and_refused_keeps_its_key_while_its_run_is_there(
    client: httpx.AsyncClient, redis: Redis, run: Run, rewarder: FakeRewarder
) -> None:
    first = await client.post("/v1/runs", json=run, headers=KEYED)
    await rewrite_claim(redis, answer=None, claimed_at_s=0.0)
    rewarder.status = 500
    assert (await client.post("/v1/runs", json=run, headers=KEYED)).status_code == 503
    rewarder.status = 200
    again = await client.post("/v1/runs", json=run, headers=KEYED)
    assert again.json()["run"]["run_id"] == first.json()["run"]["run_id"]
    assert await redis.zcard(RUNS) == 1


async def test_other_keys_and_no_key_make_runs_of_their_own(client: httpx.AsyncClient, redis: Redis, run: Run) -> None:
    for headers in ({}, {}, {"Idempotency-Key": "a"}, {"Idempotency-Key": "b"}):
        assert (await client.post("/v1/runs", json=run, headers=headers)).status_code == 202
    assert await redis.zcard(RUNS) == 4


async def test_many_at_once_make_one_run(client: httpx.AsyncClient, redis: Redis, run: Run) -> None:
    replies = await asyncio.gather(*(client.post("/v1/runs", json=run, headers=KEYED) for _ in range(8)))
    assert {reply.status_code for reply in replies} <= {202, 409}
    made = {reply.json()["run"]["run_id"] for reply in replies if reply.status_code == 202}
    assert len(made) == 1
    assert await redis.zcard(RUNS) == 1


async def test_while_the_first_request_is_in_flight_the_second_gets_retry_after(
    client: httpx.AsyncClient, redis: Redis, run: Run
) -> None:
    await client.post("/v1/runs", json=run, headers=KEYED)
    await rewrite_claim(redis, answer=None)
    reply = await client.post("/v1/runs", json=run, headers=KEYED)
    assert reply.status_code == 409
    assert reply.headers["retry-after"] == "2"


async def test_a_claim_whose_process_died_is_carried_on_with_the_same_run_id(
    client: httpx.AsyncClient, redis: Redis, run: Run
) -> None:
    first = await client.post("/v1/runs", json=run, headers=KEYED)
    await rewrite_claim(redis, answer=None, claimed_at_s=0.0)
    again = await client.post("/v1/runs", json=run, headers=KEYED)
    assert again.status_code == 202
    assert again.json()["run"]["run_id"] == first.json()["run"]["run_id"]
    assert await redis.zcard(RUNS) == 1


async def test_a_submit_with_long_timeouts_is_not_taken_for_abandoned(
    settings: TrainerSettings, redis: Redis, run: Run
) -> None:
    patient = settings.model_copy(update={"dataset_check_timeout_s": 600.0})
    assert patient.longest_submit_s() > 1200.0
    async with serving(make_api(patient, redis, stopping=asyncio.Event())) as client:
        await client.post("/v1/runs", json=run, headers=KEYED)
        for age_s, status in ((1200.0, 409), (patient.longest_submit_s() + 1.0, 202)):
            await rewrite_claim(redis, answer=None, claimed_at_s=time.time() - age_s)
            assert (await client.post("/v1/runs", json=run, headers=KEYED)).status_code == status


async def test_two_requests_that_carry_on_one_claim_create_its_run_once(
    client: httpx.AsyncClient, api: TrainerApi, redis: Redis, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    creating, create = cast("Any", api.creating), api.store.create
    created: list[str] = []

    async def counted(run_id: str, *args: Any, **options: Any) -> RunRecord:
        created.append(run_id)
        return await create(run_id, *args, **options)

    monkeypatch.setattr(api.store, "create", counted)
    async with asyncio.TaskGroup() as requests, creating:
        first = requests.create_task(client.post("/v1/runs", json=run, headers=KEYED))
        await eventually(lambda: len(creating._waiters or ()) == 1)
        await rewrite_claim(redis, claimed_at_s=0.0)
        second = requests.create_task(client.post("/v1/runs", json=run, headers=KEYED))
        await eventually(lambda: len(creating._waiters or ()) == 2)
    assert first.result().json()["run"]["run_id"] == second.result().json()["run"]["run_id"]
    assert len(created) == 1


async def test_a_refused_run_gives_its_key_back(
    client: httpx.AsyncClient, run: Run, rewarder: FakeRewarder, dataset: DatasetFile
) -> None:
    dataset.write("")
    assert (await client.post("/v1/runs", json=run, headers=KEYED)).status_code == 422
    dataset.write(dataset.good_rows)
    rewarder.status = 500
    assert (await client.post("/v1/runs", json=run, headers=KEYED)).status_code == 503
    rewarder.status = 200
    assert (await client.post("/v1/runs", json=run, headers=KEYED)).status_code == 202


@pytest.mark.parametrize("key", ["", "with space", "x" * 256])
async def test_an_unusable_key_is_a_400(client: httpx.AsyncClient, run: Run, key: str) -> None:
    reply = await client.post("/v1/runs", json=run, headers={"Idempotency-Key": key})
    assert reply.status_code == 400


async def test_keys_are_forgotten_after_a_day(client: httpx.AsyncClient, redis: Redis, run: Run) -> None:
    await client.post("/v1/runs", json=run, headers=KEYED)
    (name,) = await redis.keys(f"{SUBMIT}:*")
    assert 86_300 < await redis.ttl(name) <= 86_400


def fail(
    patch: pytest.MonkeyPatch, redis: Redis, command: str, *, from_call: int = 1, loses_first_answer: bool = False
) -> None:
    """Make Redis refuse a command for lack of memory, from a given call on."""
    real, num_calls = getattr(redis, command), 0

    async def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls < from_call or (loses_first_answer and num_calls == 1):
            answer = await real(*args, **kwargs)
            if loses_first_answer:
                raise ConnectionError("Connection lost")
            return answer
        raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'")

    patch.setattr(redis, command, call)


async def rewrite_claim(redis: Redis, **changes: Any) -> None:
    """Change what is stored for the only key."""
    (name,) = await redis.keys(f"{SUBMIT}:*")
    stored: Any = await redis.get(name)
    await redis.set(name, msgspec.json.encode(msgspec.json.decode(stored) | changes), keepttl=True)
