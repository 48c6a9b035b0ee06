"""Listing, showing, stopping and deleting runs; the key; health; errors that are problem+json everywhere."""

import time
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from services.generator.registration import in_fleet, registered
from services.trainer.run_api.api import create_app
from services.trainer.run_api.trainer_api import TrainerApi
from shared.redis.keys import GENERATORS, REFUSALS, REWARDERS, RunKeys
from shared.redis.lease import renew
from shared.redis.redis_connection import Redis, call
from shared.redis.run_record import Progress, RunRecord
from shared.redis.run_store import RunStore
from shared.refusals import refuse, take_back
from tests.trainer.api_rig import KEY
from tests.trainer.run_api.submitting import submit

Run = dict[str, Any]


async def test_every_route_but_health_is_refused_without_the_key(client: httpx.AsyncClient, api: TrainerApi) -> None:
    routes = [route for route in create_app(api).routes if isinstance(route, APIRoute)]
    assert len(routes) >= 12
    checked = 0
    for route in routes:
        if route.path in {"/livez", "/readyz"}:
            continue
        path = route.path.format(run_id="run-a", entry="1-0", upload_id="sha256-0", sha256="0")
        for method in route.methods:
            for header in ("", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x"):
                reply = await client.request(method, path, headers={"Authorization": header})
                assert reply.status_code == 401, (method, path, header)
                assert reply.headers["content-type"] == "application/problem+json"
                checked += 1
    assert checked >= 50
    for path in ("/openapi.json", "/docs", "/redoc", "/nothing"):
        assert (await client.get(path, headers={"Authorization": ""})).status_code == 401


async def test_health_is_open_and_carries_no_data(client: httpx.AsyncClient) -> None:
    for path, status in (("/livez", "alive"), ("/readyz", "ready")):
        reply = await client.get(path, headers={"Authorization": ""})
        assert reply.status_code == 200
        assert reply.json() == {"status": status}


async def test_a_wiped_redis_is_not_ready_but_alive(client: httpx.AsyncClient, redis: Redis) -> None:
    await redis.function_flush()
    reply = await client.get("/readyz")
    assert reply.status_code == 503
    assert "restart the services" in reply.json()["detail"]
    assert (await client.get("/livez")).status_code == 200


async def test_a_service_that_is_stopping_is_not_ready(client: httpx.AsyncClient, api: TrainerApi) -> None:
    api.stopping.set()
    assert (await client.get("/readyz")).status_code == 503


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/runs/", 404),
        ("GET", "/v1/runs/run-none", 404),
        ("GET", "/v1/runs/%2e%2e", 404),
        ("GET", "/v1/runs/a%00b", 404),
        ("GET", f"/v1/runs/{'x' * 65}", 404),
        ("GET", "/v1/runs/run-none/metrics", 404),
        ("GET", "/v1/runs/run-none/events", 404),
        ("GET", "/v1/runs/run-none/rollouts", 404),
        ("GET", "/v1/runs/run-none/dead_letters", 404),
        ("POST", "/v1/runs/run-none/dead_letters/1-0/replay", 404),
        ("POST", "/v1/runs/run-none/stop", 404),
        ("POST", "/v1/runs/run-none/pause", 404),
        ("POST", "/v1/runs/run-none/resume", 404),
        ("DELETE", "/v1/runs/run-none", 404),
        ("PUT", "/v1/runs", 405),
        ("GET", "/v1/runs?limit=0", 422),
        ("GET", "/v1/runs?limit=many", 422),
        ("GET", "/v1/runs?limit=8%C2%85", 422),
        ("GET", "/v1/runs?limit=1_0", 422),
        ("GET", "/v1/runs?limit=%D9%A3", 422),
        ("GET", "/v1/runs?cursor=canary", 400),
        ("POST", "/v1/runs?dry_run=perhaps", 422),
    ],
)
async def test_every_refusal_is_a_problem_with_a_sentence(
    client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    reply = await client.request(method, path)
    assert reply.status_code == status
    assert reply.headers["content-type"] == "application/problem+json"
    body = reply.json()
    assert body["status"] == status
    assert body["title"]
    assert len(body["detail"]) > 15
    assert "canary" not in reply.text
    assert "perhaps" not in reply.text


async def test_the_openapi_document_names_every_setting_and_every_problem(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    submit_route = document["paths"]["/v1/runs"]["post"]
    of_body = submit_route["requestBody"]["content"]["application/json"]["schema"]
    assert of_body == {"$ref": "#/components/schemas/RunConfig"}
    settings = document["components"]["schemas"]["RunConfig"]["properties"]
    assert {"model", "dataset_name", "reward_funcs", "num_generations"} <= set(settings)
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                if int(status) >= 400:
                    assert "application/problem+json" in answer["content"]


async def test_runs_are_listed_newest_first_in_pages(client: httpx.AsyncClient, run: Run) -> None:
    made = [await submit(client, run | {"name": f"run{n}"}) for n in range(5)]
    assert [item["run_id"] for item in (await client.get("/v1/runs")).json()["runs"]] == made[::-1]
    seen: list[str] = []
    cursor: str | None = None
    pages = 0
    while True:
        params = {"limit": "2"} | ({"cursor": cursor} if cursor else {})
        page = (await client.get("/v1/runs", params=params)).json()
        seen += [item["run_id"] for item in page["runs"]]
        pages += 1
        cursor = page["next_cursor"]
        if cursor is None:
            break
        await submit(client, run)  # a newer run does not shift the pages
    assert seen == made[::-1]
    assert pages == 3


async def test_a_queued_run_says_what_it_is_waiting_for(client: httpx.AsyncClient, run: Run, redis: Redis) -> None:
    first, second = await submit(client, run), await submit(client, run)
    assert (await client.get(f"/v1/runs/{first}")).json()["waiting_for"] == "its training rank to be started"
    store = RunStore(redis)
    await store.set_current_run(first)
    await store.set_status(first, "running")
    waiting = (await client.get(f"/v1/runs/{second}")).json()["waiting_for"]
    assert waiting == f"run {first} to end: the generator fleet serves one run at a time"


async def test_a_running_run_shows_its_streams_its_generators_and_what_is_missing(
    client: httpx.AsyncClient, run: Run, redis: Redis
) -> None:
    run_id = await submit(client, run)
    keys, store = RunKeys(run_id), RunStore(redis)
    await store.set_current_run(run_id)
    await store.set_status(run_id, "running")
    await store.write_progress(
        run_id, Progress(step=1, waiting_for="scored groups", groups_scored=2, updated_at_s=time.time())
    )
    await redis.xadd(keys.prompts, {"group_id": "00000000", "payload": b""})
    await redis.xadd(keys.completions, {"group_id": "00000001", "payload": b""})
    for number in range(2, 7):  # two wait to be trained; three were trained, and no checkpoint has them yet
        await redis.xadd(keys.scored, {"group_id": f"{number:08d}", "payload": b""})

    shown = (await client.get(f"/v1/runs/{run_id}")).json()
    assert shown["queues"] == {"prompts": 1, "completions": 1, "scored": 2, "settled": 3, "dead_letters": 0}
    assert shown["generators"] == []
    assert shown["waiting_for"].startswith("a generator: no live generator serves this run")

    async with in_fleet(redis, replica_id="generator-1", url="http://127.0.0.1:2", patience_s=5.0, doing="starting"):
        starting = (await client.get(f"/v1/runs/{run_id}")).json()["waiting_for"]
    assert starting == "a generator: generator-1 is starting"

    await redis.hset(keys.generators, "generator-0", '{"url": "http://127.0.0.1:1"}')
    await redis.hset(keys.generators, "generator-1", '{"url": "http://127.0.0.1:2"}')
    await renew(redis, leases=keys.leases(GENERATORS), consumer="generator-1")
    shown = (await client.get(f"/v1/runs/{run_id}")).json()
    assert shown["generators"] == [
        {"replica_id": "generator-0", "url": "http://127.0.0.1:1", "is_alive": False, "doing": ""},
        {"replica_id": "generator-1", "url": "http://127.0.0.1:2", "is_alive": True, "doing": ""},
    ]
    assert shown["waiting_for"].startswith("a rewarder: 1 groups wait to be scored")

    await renew(redis, leases=keys.leases(REWARDERS), consumer="rewarder-0")
    shown = (await client.get(f"/v1/runs/{run_id}")).json()
    assert (shown["waiting_for"], shown["num_rewarders"], shown["num_sessions"]) == ("scored groups", 1, None)
    assert shown["progress"]["step"] == 1
    assert shown["config"]["num_generations"] == 4


async def test_why_a_generator_cannot_serve_a_run_is_shown_and_listed_until_it_does(
    client: httpx.AsyncClient, run: Run, redis: Redis
) -> None:
    run_id = await submit(client, run)
    store = RunStore(redis)
    await store.set_current_run(run_id)
    await store.set_status(run_id, "running")
    await store.write_progress(run_id, Progress(waiting_for="a generator", updated_at_s=time.time()))

    async def shown() -> dict[str, Any]:
        answer: dict[str, Any] = (await client.get(f"/v1/runs/{run_id}")).json()
        (listed,) = (await client.get("/v1/runs")).json()["runs"]
        assert listed["waiting_for"] == answer["waiting_for"]
        return answer

    seat: dict[str, Any] = {"replica_id": "generator-0", "url": "http://127.0.0.1:1", "patience_s": 5.0}
    async with registered(redis, RunKeys(run_id), **seat) as generator:
        assert (await shown())["waiting_for"] == "a generator: generator-0 is loading the model"
        await generator.refuse("weight_transport is nccl, but this generator runs on CPU")
        refused = await shown()
        assert refused["waiting_for"] == (
            "a generator that can serve this run. generator-0 is unable to serve this run: "
            "weight_transport is nccl, but this generator runs on CPU"
        )
        ((kind, replica_id),) = [(it["kind"], it["replica_id"]) for it in refused["refusals"]]
        assert (kind, replica_id) == ("generator", "generator-0")
        await generator.serve()
        served = await shown()
        assert (served["waiting_for"], served["refusals"]) == ("a generator", [])

    # The generator ends and registers again. Its message is shown until it serves.
    await refuse(redis, "generator", "generator-0", "it ended, saying: out of memory", run_id=run_id)
    assert (await shown())["waiting_for"].endswith("Last messages: generator-0: it ended, saying: out of memory")
    async with registered(redis, RunKeys(run_id), **seat):
        assert (await shown())["waiting_for"] == (
            "a generator that can serve this run. generator-0 is loading the model: it ended, saying: out of memory"
        )
    await store.set_status(run_id, "failed", reason="enough")
    assert (await shown())["refusals"] == []


async def test_generators_that_pushes_leave_out_are_named_with_the_reason(
    client: httpx.AsyncClient, run: Run, redis: Redis
) -> None:
    run_id = await submit(client, run)
    store = RunStore(redis)
    await store.set_status(run_id, "running")
    left_out = {"generator-7": "it refused GET info: HTTP 401"}
    await store.write_progress(run_id, Progress(updated_at_s=time.time(), num_left_out=1, left_out=left_out))
    (refusal,) = (await client.get(f"/v1/runs/{run_id}")).json()["refusals"]
    assert (refusal["kind"], refusal["replica_id"]) == ("generator", "generator-7")
    assert refusal["reason"] == "the last push left it out: it refused GET info: HTTP 401"
    await store.write_progress(run_id, Progress(updated_at_s=time.time()))
    assert (await client.get(f"/v1/runs/{run_id}")).json()["refusals"] == []


async def test_replicas_that_did_not_even_start_are_shown_in_whichever_run_waits_for_them(
    client: httpx.AsyncClient, run: Run, redis: Redis
) -> None:
    await refuse(redis, "generator", "generator-0", "HEADRACE_ENGINE_ARGS: vLLM has no such argument", run_id=None)
    assert 0 < await redis.ttl(REFUSALS) <= 24 * 3600
    run_id = await submit(client, run)
    store = RunStore(redis)
    await store.set_status(run_id, "running")
    await store.write_progress(run_id, Progress(updated_at_s=time.time()))
    waiting = (await client.get(f"/v1/runs/{run_id}")).json()["waiting_for"]
    assert waiting.endswith("Last messages: generator-0: HEADRACE_ENGINE_ARGS: vLLM has no such argument")
    await take_back(redis, "generator", "generator-0", run_id=None)
    assert (await client.get(f"/v1/runs/{run_id}")).json()["refusals"] == []


async def test_nothing_is_left_in_redis_by_a_replica_that_refuses_a_run_that_is_gone(redis: Redis) -> None:
    await refuse(redis, "generator", "generator-0", "too late", run_id="run-gone")
    assert await redis.keys("*run-gone*") == []


async def test_a_queued_run_is_stopped_at_once_and_stopping_again_changes_nothing(
    client: httpx.AsyncClient, run: Run
) -> None:
    run_id = await submit(client, run)
    first = await client.post(f"/v1/runs/{run_id}/stop")
    again = await client.post(f"/v1/runs/{run_id}/stop")
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json()["status"] == "stopped"
    assert first.json()["reason"] == "stopped before it started"
    assert again.json()["ended_at_s"] == first.json()["ended_at_s"]


async def test_a_running_run_is_asked_to_stop(client: httpx.AsyncClient, run: Run, redis: Redis) -> None:
    run_id = await submit(client, run)
    await RunStore(redis).set_status(run_id, "running")
    shown = (await client.post(f"/v1/runs/{run_id}/stop")).json()
    assert (shown["status"], shown["desired"]) == ("running", "stop")
    assert shown["waiting_for"] == "its training rank to finish its step and stop"


async def test_only_a_run_that_has_ended_is_deleted_and_its_directory_stays(
    client: httpx.AsyncClient, run: Run, redis: Redis, api: TrainerApi
) -> None:
    run_id = await submit(client, run)
    refused = await client.delete(f"/v1/runs/{run_id}")
    assert refused.status_code == 409
    assert "stop first" in refused.json()["detail"]
    await client.post(f"/v1/runs/{run_id}/stop")
    assert (await client.delete(f"/v1/runs/{run_id}")).status_code == 204
    assert (await client.get(f"/v1/runs/{run_id}")).status_code == 404
    assert await redis.keys(f"*{run_id}*") == []
    assert (api.settings.runs_dir / run_id / "config.json").exists()


async def test_a_failed_run_that_was_just_resumed_is_not_deleted(
    client: httpx.AsyncClient, run: Run, redis: Redis, api: TrainerApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resume comes after the delete has found the run, and before it deletes it."""
    run_id = await submit(client, run)
    await RunStore(redis).set_status(run_id, "failed", reason="the disk was full")
    get = api.store.get

    async def resumed_after_the_first_look(run_id: str) -> RunRecord | None:
        record = await get(run_id)
        monkeypatch.setattr(api.store, "get", get)
        await api.supervisor.resume_run(run_id)
        return record

    monkeypatch.setattr(api.store, "get", resumed_after_the_first_look)
    refused = await client.delete(f"/v1/runs/{run_id}")
    assert refused.status_code == 409
    assert refused.json()["detail"].startswith("The run is queued. ")
    assert (await client.get(f"/v1/runs/{run_id}")).json()["status"] == "queued"


async def test_dead_letters_are_listed_and_put_back_where_they_died(
    client: httpx.AsyncClient, run: Run, redis: Redis
) -> None:
    run_id = await submit(client, run)
    keys = RunKeys(run_id)
    for number in range(3):
        entry = await redis.xadd(keys.completions, {"group_id": f"{number:08d}", "payload": b"torn"})
        await redis.xreadgroup(REWARDERS, "rewarder-0", {keys.completions: ">"})
        await call(
            redis,
            "headrace_bury",
            keys=(keys.completions, keys.dead),
            args=(REWARDERS, "rewarder-0", entry, f"{number:08d}", "not a message", b"torn"),
        )
    path = f"/v1/runs/{run_id}/dead_letters"
    page = (await client.get(path, params={"limit": "2"})).json()
    rest = (await client.get(path, params={"cursor": page["next_cursor"]})).json()
    assert [letter["group_id"] for letter in page["dead_letters"]] == ["00000000", "00000001"]
    assert [letter["group_id"] for letter in rest["dead_letters"]] == ["00000002"]
    assert rest["next_cursor"] is None
    letter = page["dead_letters"][0]
    assert (letter["stream"], letter["reason"], letter["size_bytes"]) == ("completions", "not a message", 4)

    assert (await client.post(f"{path}/{letter['entry']}/replay")).status_code == 202
    assert (await client.post(f"{path}/{letter['entry']}/replay")).status_code == 404
    entries: Any = await redis.xrange(keys.completions)
    assert [fields[b"group_id"] for _, fields in entries] == [b"00000000"]
    assert (await client.get(f"/v1/runs/{run_id}")).json()["queues"]["dead_letters"] == 2
    for odd in ("1", "x-y", "99999999999999999999-0"):
        assert (await client.post(f"{path}/{odd}/replay")).status_code == 404


async def test_a_dead_letter_of_a_run_that_has_ended_is_not_replayed(client: httpx.AsyncClient, run: Run) -> None:
    run_id = await submit(client, run)
    await client.post(f"/v1/runs/{run_id}/stop")
    assert (await client.post(f"/v1/runs/{run_id}/dead_letters/1-0/replay")).status_code == 409
