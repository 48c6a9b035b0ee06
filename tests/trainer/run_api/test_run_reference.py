"""A run's id, its name, or the beginning of its id: which run a client means, and when the API does not choose."""

from typing import Any

import httpx
import pytest

from services.trainer.run_api import run_lookup, run_reference
from shared.redis.keys import RUNS_BY_ID, RUNS_BY_NAME
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.trainer.run_api.submitting import submit

Run = dict[str, Any]


async def meant(client: httpx.AsyncClient, reference: str) -> str:
    """Return the id of the run that a reading request finds."""
    reply = await client.get(f"/v1/runs/{reference}")
    assert reply.status_code == 200, reply.text
    return str(reply.json()["run_id"])


async def test_a_run_is_found_by_its_id_its_name_and_the_beginning_of_its_id(
    client: httpx.AsyncClient, run: Run
) -> None:
    first, second = await submit(client, run, "first"), await submit(client, run, "second.try")
    assert await meant(client, first) == first
    assert await meant(client, "first") == first
    assert await meant(client, "second.try") == second
    assert await meant(client, first[:8]) == first
    assert await meant(client, second[:-1]) == second


@pytest.mark.parametrize("path", ["metrics", "evaluations", "rollouts", "dead_letters"])
async def test_every_list_of_a_run_takes_its_name_and_answers_with_its_id(
    client: httpx.AsyncClient, run: Run, path: str
) -> None:
    run_id = await submit(client, run, "first")
    assert (await client.get(f"/v1/runs/first/{path}")).json()["run_id"] == run_id


async def test_the_events_of_a_run_are_found_by_its_name(client: httpx.AsyncClient, run: Run) -> None:
    run_id = await submit(client, run, "first")
    await client.post(f"/v1/runs/{run_id}/stop")
    assert f'"run_id": "{run_id}"' in (await client.get("/v1/runs/first/events")).text


@pytest.mark.parametrize("reference", ["r", "run-", "firs", "FIRST", "other"])
async def test_a_guess_is_not_a_run(client: httpx.AsyncClient, run: Run, reference: str) -> None:
    """All ids begin with `run-`, and a name is not abbreviated."""
    await submit(client, run, "first")
    assert (await client.get(f"/v1/runs/{reference}")).status_code == 404
    assert (await client.post(f"/v1/runs/{reference}/stop")).status_code == 404


async def test_a_name_that_several_runs_have_means_the_one_that_has_not_ended_to_a_reader(
    client: httpx.AsyncClient, run: Run
) -> None:
    ended, queued = await submit(client, run, "again"), await submit(client, run, "again")
    await client.post(f"/v1/runs/{ended}/stop")
    assert await meant(client, "again") == queued

    await client.post(f"/v1/runs/{queued}/stop")
    refused = await client.get("/v1/runs/again")
    assert refused.status_code == 409
    body = refused.json()
    assert body["type"] == "/problems/ambiguous-run"
    assert [(one["run_id"], one["name"], one["status"]) for one in body["candidates"]] == [
        (queued, "again", "stopped"),
        (ended, "again", "stopped"),
    ]
    assert body["detail"].startswith(f"2 runs have this name. Use the id of one: {queued} (again, stopped), {ended}")


@pytest.mark.parametrize(
    ("method", "route"), [("POST", "/stop"), ("POST", "/pause"), ("POST", "/resume"), ("DELETE", "")]
)
async def test_a_change_never_chooses_between_runs_of_one_name(
    client: httpx.AsyncClient, run: Run, method: str, route: str
) -> None:
    """The training run of this name has just ended. The next one must not be stopped in its place."""
    ended, queued = await submit(client, run, "again"), await submit(client, run, "again")
    await client.post(f"/v1/runs/{ended}/stop")
    refused = await client.request(method, f"/v1/runs/again{route}")
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/ambiguous-run")
    assert (await client.get(f"/v1/runs/{queued}")).json()["desired"] == "run"
    assert (await client.get(f"/v1/runs/{ended}")).status_code == 200


async def test_a_change_takes_the_name_of_one_run(client: httpx.AsyncClient, run: Run) -> None:
    run_id = await submit(client, run, "first")
    assert (await client.post("/v1/runs/first/stop")).json()["run_id"] == run_id
    assert (await client.delete("/v1/runs/first")).status_code == 204
    assert (await client.get("/v1/runs/first")).status_code == 404


async def test_the_beginning_of_several_ids_is_ambiguous_and_an_id_is_not(
    client: httpx.AsyncClient, redis: Redis, run_config: RunConfig
) -> None:
    store = RunStore(redis)
    for run_id in ("run-aaaa", "run-aaaab", "run-aaaac"):
        await store.create(run_id, run_config, run_dir="/runs")
    await store.set_status("run-aaaab", "stopped")
    refused = await client.get("/v1/runs/run-aaaa")
    assert refused.json()["run_id"] == "run-aaaa"
    await store.delete("run-aaaa")
    refused = await client.get("/v1/runs/run-aaaa")
    assert refused.status_code == 409
    assert "2 runs have an id that begins like this" in refused.json()["detail"]


async def test_a_name_comes_before_the_beginning_of_an_id(
    client: httpx.AsyncClient, redis: Redis, run_config: RunConfig
) -> None:
    store = RunStore(redis)
    await store.create("run-aaaab", run_config, run_dir="/runs")
    await store.create("run-b", run_config.model_copy(update={"name": "run-aaaa"}), run_dir="/runs")
    assert await meant(client, "run-aaaa") == "run-b"


async def test_a_request_reads_a_bounded_number_of_runs(
    client: httpx.AsyncClient, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound it is not known whether exactly one has not ended, so nothing is chosen."""
    made = [await submit(client, run, "again") for _ in range(3)]
    for run_id in made[:2]:
        await client.post(f"/v1/runs/{run_id}/stop")
    assert await meant(client, "again") == made[2]
    for module in (run_lookup, run_reference):
        monkeypatch.setattr(module, "MAX_READ", 2)
        monkeypatch.setattr(module, "MAX_SHOWN", 2)
    refused = (await client.get("/v1/runs/again")).json()
    assert refused["detail"].startswith("More than 2 runs have this name")
    assert len(refused["candidates"]) == 2


async def test_runs_of_an_older_release_are_found_after_a_start(
    client: httpx.AsyncClient, run: Run, redis: Redis
) -> None:
    run_id = await submit(client, run, "first")
    await redis.delete(RUNS_BY_ID, RUNS_BY_NAME)
    assert (await client.get("/v1/runs/first")).status_code == 404
    await RunStore(redis).mend_lists()
    assert await meant(client, "first") == run_id
    assert await meant(client, run_id[:10]) == run_id
