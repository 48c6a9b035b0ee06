"""Submitting a run that begins from a checkpoint: it is checked, held, shown, and refused with a sentence."""

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.trainer.settings import TrainerSettings
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from tests.trainer.beginning.made_checkpoints import make_checkpoint
from tests.trainer.run_api.submitting import submit

Run = dict[str, Any]
MODEL: Run = {"model_type": "qwen3", "max_position_embeddings": 512}


@pytest.fixture
async def source(client: httpx.AsyncClient, run: Run, redis: Redis, settings: TrainerSettings) -> str:
    """Return the id of a run named `first` that made two of its four steps."""
    run_id = await submit(client, run, "first")
    await RunStore(redis).set_status(run_id, "stopped")
    make_checkpoint(settings.runs_dir / run_id, step=2, model=MODEL)
    return run_id


async def shown(client: httpx.AsyncClient, run_id: str) -> Run:
    reply = await client.get(f"/v1/runs/{run_id}")
    assert reply.status_code == 200, reply.text
    body: Run = reply.json()
    return body


async def refused(client: httpx.AsyncClient, run: Run) -> Run:
    reply = await client.post("/v1/runs", json=run)
    assert reply.status_code == 422, reply.text
    return {error["field"]: error["message"] for error in reply.json()["errors"]}


@pytest.mark.parametrize("reference", ["the id", "the beginning of the id", "the name"])
async def test_a_run_begins_from_a_run_by_its_id_or_name(
    client: httpx.AsyncClient, run: Run, source: str, settings: TrainerSettings, reference: str
) -> None:
    said = {"the id": source, "the beginning of the id": source[:12], "the name": "first:2"}[reference]
    run_id = await submit(client, run | {"resume_from_checkpoint": said}, "second")
    beginning = (await shown(client, run_id))["beginning"]
    assert beginning == {
        "source": "checkpoint",
        "said": said,
        "run_id": source,
        "run_name": "first",
        "step": 2,
        "steps_before": 2,
        "weights_only": False,
        "says": f"step 2 of {source} (first)",
    }
    assert (await shown(client, source))["beginning"] is None
    shutil.rmtree(settings.runs_dir / source / "checkpoints")
    held = settings.runs_dir / run_id / "beginning"
    assert (held / "core_state.json").is_file(), "the source may prune its checkpoint while this run is queued"


async def test_a_run_that_is_stopped_in_the_queue_holds_no_files_of_its_source(
    client: httpx.AsyncClient, run: Run, source: str, settings: TrainerSettings
) -> None:
    run_id = await submit(client, run | {"resume_from_checkpoint": source})
    assert (settings.runs_dir / run_id / "beginning").is_dir()
    assert (await client.post(f"/v1/runs/{run_id}/stop")).is_success
    stopped = await shown(client, run_id)
    assert (stopped["status"], stopped["beginning"]["run_id"]) == ("stopped", source)
    assert [path.name for path in (settings.runs_dir / run_id).glob("beginning*")] == ["beginning.json"]


async def test_a_dry_run_says_where_it_would_begin_and_how_many_steps_are_left(
    client: httpx.AsyncClient, run: Run, source: str, settings: TrainerSettings
) -> None:
    before = sorted(settings.runs_dir.iterdir())
    reply = await client.post("/v1/runs", params={"dry_run": "true"}, json=run | {"resume_from_checkpoint": source})
    derived = reply.json()["derived"]
    assert (derived["begins_from"], derived["steps"]) == (f"step 2 of {source} (first)", 2)
    assert sorted(settings.runs_dir.iterdir()) == before


async def test_max_steps_counts_the_steps_of_the_source(client: httpx.AsyncClient, run: Run, source: str) -> None:
    said = await refused(client, run | {"resume_from_checkpoint": source, "max_steps": 2})
    assert "has made 2 optimizer steps, and max_steps ends the run at 2: nothing is left" in said["max_steps"]
    run_id = await submit(client, run | {"resume_from_checkpoint": source, "max_steps": 3})
    reply = await client.patch(f"/v1/runs/{run_id}", json={"max_steps": 2})
    assert reply.status_code == 422
    assert "must be a whole number above 2" in reply.text
    assert (await client.patch(f"/v1/runs/{run_id}", json={"max_steps": 9})).status_code == 200


async def test_bad_sources_are_refused_before_anything_is_queued(
    client: httpx.AsyncClient, run: Run, source: str, settings: TrainerSettings, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    before = sorted(settings.runs_dir.iterdir())
    for said, sentence in (
        ("nothing", "there is no run 'nothing'"),
        (f"{source}:7", "has no checkpoint of step 7; it has 2"),
        ("/etc/ssl", "is not in a place that runs may name"),
        (str(tmp_path / "empty"), "is not a checkpoint"),
        (f"{tmp_path}/../x", "has '..' in it"),
    ):
        assert sentence in (await refused(client, run | {"resume_from_checkpoint": said}))["resume_from_checkpoint"]
    assert sorted(settings.runs_dir.iterdir()) == before


async def test_options_without_a_checkpoint_are_refused(client: httpx.AsyncClient, run: Run) -> None:
    said = await refused(client, run | {"resume_only_model": True})
    assert "resume_only_model has no effect without resume_from_checkpoint" in " ".join(said.values())
