"""Changing a run after its submit, and finding it by what was changed."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from services.trainer.run_api import edit_route
from services.trainer.run_api.trainer_api import TrainerApi
from shared.redis.redis_connection import Redis
from shared.redis.run_record import Progress, Status
from shared.redis.run_store import RunStore
from tests.trainer.run_api.submitting import submit

Run = dict[str, Any]
LABELS: dict[str, Any] = {"tags": ["sweep", "lr:1e-4"], "metadata": {"lr": 1e-4, "who": "ada", "try": 3}}


async def edit(client: httpx.AsyncClient, run: str, **changes: Any) -> Run:
    reply = await client.patch(f"/v1/runs/{run}", json=changes)
    assert reply.status_code == 200, reply.text
    shown: Run = reply.json()
    return shown


async def test_tags_and_metadata_of_a_run_file_are_shown(client: httpx.AsyncClient, run: Run) -> None:
    run_id = await submit(client, run | LABELS)
    for shown in ((await client.get(f"/v1/runs/{run_id}")).json(), (await client.get("/v1/runs")).json()["runs"][0]):
        assert {name: shown[name] for name in LABELS} == LABELS


async def test_a_run_is_found_by_its_tags(client: httpx.AsyncClient, run: Run) -> None:
    both = await submit(client, run | {"tags": ["a", "b"]})
    one = await submit(client, run | {"tags": ["a"]})
    await submit(client, run)

    async def found(*tags: str) -> list[str]:
        return [item["run_id"] for item in (await client.get("/v1/runs", params={"tag": tags})).json()["runs"]]

    assert await found("a") == [one, both]
    assert await found("a", "b") == [both]
    assert await found("c") == []


async def test_a_renamed_run_is_found_by_its_new_name_only(
    client: httpx.AsyncClient, run: Run, api: TrainerApi
) -> None:
    run_id = await submit(client, run, "first")
    shown = await edit(client, "first", name="second")
    assert (shown["run_id"], shown["name"], shown["config"]["name"]) == (run_id, "second", "second")
    assert (await client.get("/v1/runs/second")).json()["run_id"] == run_id
    assert (await client.get("/v1/runs/first")).status_code == 404
    assert json.loads((api.settings.runs_dir / run_id / "config.json").read_text())["name"] == "second"
    assert (await edit(client, run_id, name=None))["name"] is None
    assert (await client.get("/v1/runs/second")).status_code == 404


async def test_labels_of_a_run_that_has_ended_are_changed(client: httpx.AsyncClient, run: Run) -> None:
    run_id = await submit(client, run | LABELS)
    await client.post(f"/v1/runs/{run_id}/stop")
    shown = await edit(client, run_id, tags=["best"], metadata={"who": None, "lr": 1e-5, "note": "keep"})
    assert shown["tags"] == ["best"]
    assert shown["metadata"] == {"lr": 1e-5, "try": 3, "note": "keep"}
    assert shown["status"] == "stopped"
    assert (await edit(client, run_id, tags=None))["tags"] == []


async def test_edits_at_the_same_time_do_not_undo_each_other(client: httpx.AsyncClient, run: Run) -> None:
    run_id = await submit(client, run)
    await asyncio.gather(*(edit(client, run_id, metadata={f"key{number}": number}) for number in range(8)))
    shown = (await client.get(f"/v1/runs/{run_id}")).json()
    assert shown["metadata"] == {f"key{number}": number for number in range(8)}


@pytest.mark.parametrize(
    ("patch", "field", "says"),
    [
        (
            {"learning_rate": 1.0},
            "learning_rate",
            "cannot be changed after the submit; name, tags, metadata, max_steps",
        ),
        ({"name": "a b"}, "name", "use letters"),
        ({"tags": 1}, "tags", "must be a list"),
        ({"tags": ["a b"]}, "tags", "tag 0 must be"),
        ({"metadata": {"a": [1]}}, "metadata", "a must be text or a number"),
        ({"max_steps": 7}, "max_steps", "above 7, the optimizer steps that the run has made"),
        ({"max_steps": -1}, "max_steps", "above 7"),
        ({"max_steps": 8.0}, "max_steps", "must be a whole number"),
        ({"max_steps": True}, "max_steps", "must be a whole number"),
        ([], "", "a change is a JSON object"),
    ],
)
async def test_a_wrong_change_is_refused_and_changes_nothing(
    client: httpx.AsyncClient, run: Run, redis: Redis, patch: Any, field: str, says: str
) -> None:
    run_id = await submit(client, run)
    await RunStore(redis).write_progress(run_id, Progress(step=7))
    before = (await client.get(f"/v1/runs/{run_id}")).json()["config"]
    refused = await client.patch(f"/v1/runs/{run_id}", json=patch)
    assert refused.status_code == 422
    (error,) = refused.json()["errors"]
    assert error["field"] == field
    assert says in error["message"]
    assert (await client.get(f"/v1/runs/{run_id}")).json()["config"] == before


async def test_max_steps_changes_until_the_run_has_ended(client: httpx.AsyncClient, run: Run, redis: Redis) -> None:
    run_id, store = await submit(client, run), RunStore(redis)
    await edit(client, run_id, tags=["a"])
    assert (await store.wishes(run_id)).max_steps is None
    statuses: tuple[Status, ...] = ("queued", "running", "failed")
    for number, status in enumerate(statuses, start=6):
        await store.set_status(run_id, status)
        assert (await edit(client, run_id, max_steps=number))["config"]["max_steps"] == number
        assert (await store.wishes(run_id)).max_steps == number
    await store.set_status(run_id, "finished")
    refused = await client.patch(f"/v1/runs/{run_id}", json={"max_steps": 10})
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/run-ended")
    assert refused.json()["detail"].endswith("It made no step: submit it again.")


@pytest.mark.parametrize(
    ("wanted", "progress", "command"),
    [
        ("5", Progress(step=3, max_steps=4), "--set max_steps=5"),
        ("3", Progress(step=3, max_steps=4), ""),
        ("3", Progress(step=4, max_steps=4), "--set max_steps=8"),
        ("null", Progress(step=4, max_steps=4), "--set max_steps=8"),
    ],
)
async def test_the_refusal_of_a_run_that_has_ended_has_a_command_that_continues_it(
    client: httpx.AsyncClient, run: Run, redis: Redis, wanted: str, progress: Progress, command: str
) -> None:
    run_id, store = await submit(client, run), RunStore(redis)
    await store.write_progress(run_id, progress)
    await store.set_status(run_id, "finished")
    refused = await client.patch(f"/v1/runs/{run_id}", json={"max_steps": json.loads(wanted)})
    expected = f"Continue it in a new run: `{f'headrace submit --from {run_id} {command}'.strip()}`."
    assert refused.json()["detail"].endswith(expected)


async def test_max_steps_for_which_the_schedule_makes_no_sense_is_refused(client: httpx.AsyncClient, run: Run) -> None:
    run_id = await submit(client, run | {"max_steps": 100, "warmup_steps": 50})
    refused = await client.patch(f"/v1/runs/{run_id}", json={"max_steps": 20})
    assert refused.status_code == 422
    assert "warmup_steps=50 is longer than max_steps=20" in refused.json()["detail"]


async def test_a_run_is_made_longer_until_its_rank_says_that_it_is_ending(
    client: httpx.AsyncClient, run: Run, redis: Redis
) -> None:
    run_id, store = await submit(client, run), RunStore(redis)
    await store.set_status(run_id, "running")
    await edit(client, run_id, max_steps=9)
    await store.write_progress(run_id, Progress(step=4, max_steps=4))  # of a rank before max_steps was raised
    await edit(client, run_id, max_steps=10)
    for ending in (
        Progress(step=6, max_steps=10, is_ending=True),  # it stops early
        Progress(step=10, max_steps=10, starting="loading the model"),  # its rank starts again after the last step
    ):
        await store.write_progress(run_id, ending)
        refused = await client.patch(f"/v1/runs/{run_id}", json={"max_steps": 12})
        assert (refused.status_code, refused.json()["type"]) == (409, "/problems/run-is-ending")
    assert (await store.wishes(run_id)).max_steps == 10


async def test_a_run_that_was_asked_to_stop_is_not_made_longer(
    client: httpx.AsyncClient, run: Run, api: TrainerApi
) -> None:
    run_id = await submit(client, run)
    await api.store.set_status(run_id, "running")
    assert (await client.post(f"/v1/runs/{run_id}/stop")).status_code == 202
    reply = await client.patch(f"/v1/runs/{run_id}", json={"max_steps": 10_000})
    assert (reply.status_code, reply.json()["type"]) == (409, "/problems/run-is-stopping")
    record = await api.store.get(run_id)
    assert record is not None
    assert record.config["max_steps"] != 10_000
    assert (await edit(client, run_id, tags=["late"]))["tags"] == ["late"]


def test_the_document_says_which_settings_may_be_null() -> None:
    properties = edit_route._schema()["properties"]  # pyright: ignore[reportPrivateUsage]
    assert {name for name, schema in properties.items() if {"type": "null"} in schema.get("anyOf", ())} == {
        "name",
        "tags",
        "metadata",
    }
