"""Submitting a run: every error is reported before anything starts, as a sentence."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.trainer.run_api.trainer_api import make_api
from services.trainer.settings import TrainerSettings
from services.trainer.submit_checks.run_validation import RunValidator
from shared.redis.keys import RUNS, RunKeys
from shared.redis.redis_connection import Redis
from tests.trainer.api_rig import KEY, DatasetFile, FakeRewarder, serving

Run = dict[str, Any]


async def refusal(client: httpx.AsyncClient, run: Any, *, status: int = 422) -> dict[str, str]:
    """Submit an invalid run, and return the message for each field at fault."""
    reply = await client.post("/v1/runs", json=run)
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    body = reply.json()
    assert body["status"] == status
    assert body["type"].startswith("/problems/")
    return {error["field"]: error["message"] for error in body["errors"]}


async def test_a_valid_run_is_queued_with_its_streams_directory_and_config(
    client: httpx.AsyncClient, redis: Redis, run: Run, settings: TrainerSettings, rewarder: FakeRewarder
) -> None:
    reply = await client.post("/v1/runs", json=run)
    assert reply.status_code == 202
    body = reply.json()
    run_id = body["run"]["run_id"]
    assert reply.headers["location"] == f"/v1/runs/{run_id}"
    assert (body["run"]["status"], body["run"]["desired"]) == ("queued", "run")
    assert body["warnings"] == []
    assert len(run_id) == len("run-") + 26
    keys = RunKeys(run_id)
    assert await redis.exists(keys.prompts, keys.completions, keys.scored) == 3
    written = json.loads((settings.runs_dir / run_id / "config.json").read_text())
    assert written["num_generations"] == 4
    assert written["temperature"] == 1.0
    assert rewarder.keys_seen == [f"Bearer {KEY}"]


async def test_the_options_of_a_run_are_on_the_disk_before_it_is_accepted(
    client: httpx.AsyncClient, run: Run, settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss would leave half of a file that was only renamed into place."""
    synced: dict[str, int] = {}
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", noted)
    reply = await client.post("/v1/runs", json=run)
    run_dir = settings.runs_dir / reply.json()["run"]["run_id"]
    (aside,) = (Path(name) for name in synced if Path(name).parent == run_dir)
    assert synced[str(aside)] == (run_dir / "config.json").stat().st_size
    assert str(run_dir) in synced, "its directory too"


async def test_a_dry_run_says_what_the_settings_amount_to_and_starts_nothing(
    client: httpx.AsyncClient, redis: Redis, run: Run, settings: TrainerSettings
) -> None:
    reply = await client.post("/v1/runs", params={"dry_run": "true"}, json=run)
    assert reply.status_code == 200
    body = reply.json()
    assert body["valid"] is True
    assert body["run"] is None
    # 4 steps of 2 groups of 4 completions of at most 16 tokens; max_staleness is 2.
    assert body["derived"] == {
        "num_rows": 10,
        "columns": ["prompt", "solution"],
        "epoch_prompts": 10,
        "steps": 4,
        "prompt_groups": 8,
        "completions": 32,
        "max_completion_tokens": 512,
        "max_groups_in_flight": 6,
    }
    streamed = await client.post("/v1/runs", params={"dry_run": "true"}, json=run | {"dataset_streaming": True})
    derived = streamed.json()["derived"]
    assert derived["epoch_prompts"] is None
    assert "num_rows" not in derived
    assert await redis.zcard(RUNS) == 0
    assert not settings.runs_dir.exists()


async def test_a_name_that_other_runs_have_is_a_warning(client: httpx.AsyncClient, run: Run) -> None:
    named = run | {"name": "math"}
    first = (await client.post("/v1/runs", json=named)).json()
    assert first["warnings"] == []
    second = (await client.post("/v1/runs", json=named)).json()
    assert second["warnings"] == [
        f"name: another run, {first['run']['run_id']} (queued), has the name math. To change one of them, give its id"
    ]
    (warning,) = (await client.post("/v1/runs", params={"dry_run": "1"}, json=named)).json()["warnings"]
    assert warning.startswith(
        f"name: 2 other runs have the name math, the newest is {second['run']['run_id']} (queued)"
    )


async def test_an_unknown_setting_is_refused_with_the_nearest_known_one(client: httpx.AsyncClient, run: Run) -> None:
    errors = await refusal(client, run | {"num_generation": 4})
    assert errors == {"num_generation": "there is no such setting; did you mean num_generations?"}


async def test_all_errors_are_reported_in_one_answer(client: httpx.AsyncClient, run: Run) -> None:
    errors = await refusal(client, run | {"learning_rate": "fast", "num_generations": 1, "colour": "red"})
    assert set(errors) == {"learning_rate", "num_generations", "colour"}
    errors = await refusal(
        client,
        run | {"model": "/tmp/nowhere/model", "dataset_name": "/tmp/nowhere/train.jsonl", "reward_funcs": ["nice"]},
    )
    assert "no directory /tmp/nowhere/model" in errors["model"]
    assert "no file /tmp/nowhere/train.jsonl" in errors["dataset_name"]
    assert errors["reward_funcs"] == "unknown reward function nice; built in is accuracy_reward"


async def test_a_missing_setting_is_named(client: httpx.AsyncClient, run: Run) -> None:
    del run["model"]
    assert "required" in (await refusal(client, run))["model"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"reward_weights": [1.0, 2.0]}, "2 entries for 1 reward_funcs"),
        ({"epsilon": 0.3, "epsilon_high": 0.2}, "epsilon_high=0.2 is below epsilon=0.3"),
        ({"max_steps": 0}, "max_steps=0 trains nothing"),
        ({"warmup_steps": 9}, "warmup_steps=9 is longer"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "lr_scheduler_type linear takes none"),
        ({"max_completion_length": 400, "max_tokens_per_microbatch": 300}, "raise it to at least 400"),
    ],
)
async def test_an_impossible_combination_is_refused_with_the_reason(
    client: httpx.AsyncClient, run: Run, changes: Run, sentence: str
) -> None:
    assert sentence in " ".join((await refusal(client, run | changes)).values())


async def test_a_warm_up_longer_than_the_epochs_is_refused(client: httpx.AsyncClient, run: Run) -> None:
    errors = await refusal(client, run | {"max_steps": -1, "num_train_epochs": 1.0, "warmup_steps": 6})
    assert "are 5 steps" in errors["warmup_steps"]  # 10 rows, 2 a step


async def test_completions_longer_than_the_model_has_positions_are_refused(client: httpx.AsyncClient, run: Run) -> None:
    errors = await refusal(client, run | {"max_completion_length": 512})
    assert "more than the 512 positions of the model" in errors["max_completion_length"]


async def test_a_row_without_a_prompt_is_refused_with_its_line(
    client: httpx.AsyncClient, run: Run, dataset: DatasetFile
) -> None:
    dataset.write(dataset.good_rows + '{"question": "2 + 2 =", "solution": "4"}\n')
    errors = await refusal(client, run)
    assert "1 of 11 rows cannot be used" in errors["dataset_name"]
    assert "line 11" in errors["dataset_name"]
    assert "'prompt'" in errors["dataset_name"]


async def test_a_dry_run_counts_each_data_set_of_a_mixture_and_the_evaluation_set(
    client: httpx.AsyncClient, run: Run, dataset: DatasetFile
) -> None:
    first, second, held_out = dataset.path, dataset.path.with_name("second.jsonl"), dataset.path.with_name("test.jsonl")
    second.write_text('{"prompt": "3 + 3 =", "answer": "6"}\n' * 5)
    held_out.write_text('{"prompt": "4 + 4 =", "solution": "8"}\n' * 3)
    del run["dataset_name"]
    mixed = run | {
        "datasets": [{"path": str(first), "fraction": 3.0}, {"path": str(second), "fraction": 1.0}],
        "eval_dataset_name": str(held_out),
        "eval_steps": 2,
    }
    reply = await client.post("/v1/runs", params={"dry_run": "1"}, json=mixed)
    assert reply.status_code == 200, reply.text
    derived = reply.json()["derived"]
    assert derived["datasets"] == [f"{first}: 10 rows, 0.75 of the prompts", f"{second}: 5 rows, 0.25 of the prompts"]
    assert derived["num_rows"] == 15
    assert derived["epoch_prompts"] == 13  # 10 rows are three quarters of 13.3
    assert derived["columns"] == ["answer", "prompt", "solution", "source"]
    assert derived["eval_prompts"] == 3


async def test_an_error_of_a_data_set_is_reported_at_the_setting_that_names_it(
    client: httpx.AsyncClient, run: Run, dataset: DatasetFile
) -> None:
    torn = dataset.path.with_name("torn.jsonl")
    torn.write_text('{"prompt": "1 + 1 ="}\n{"prompt"\n')
    path = str(dataset.path)
    del run["dataset_name"]
    errors = await refusal(client, run | {"datasets": [{"path": path}, {"path": "more.jsonl"}]})
    assert list(errors) == ["datasets.1"]
    assert "neither an absolute path nor a Hugging Face id" in errors["datasets.1"]
    errors = await refusal(client, run | {"datasets": [{"path": path}, {"path": str(torn)}]})
    assert list(errors) == ["datasets.1"]
    assert "1 of 2 rows cannot be used" in errors["datasets.1"]
    evaluated = {"dataset_name": path, "eval_steps": 1}
    errors = await refusal(client, run | evaluated | {"eval_dataset_name": str(torn)})
    assert list(errors) == ["eval_dataset_name"]
    errors = await refusal(client, run | evaluated | {"eval_dataset_name": "/tmp/nowhere/test.jsonl"})
    assert errors == {"eval_dataset_name": "there is no file /tmp/nowhere/test.jsonl"}


async def test_a_bucket_that_the_trainer_has_no_package_for_is_refused(client: httpx.AsyncClient, run: Run) -> None:
    said = await refusal(client, {**run, "weight_transport": "disk", "weight_dir": "gs://bucket/weights"})
    assert "install gcsfs" in said["weight_dir"]


async def test_an_empty_dataset_is_refused(client: httpx.AsyncClient, run: Run, dataset: DatasetFile) -> None:
    dataset.write("")
    assert "has no rows" in (await refusal(client, run))["dataset_name"]


@pytest.mark.parametrize("field", ["model", "dataset_name"])
@pytest.mark.parametrize("path", ["./data/train.jsonl", "../model", "data/sub/thing.parquet", "~/model"])
async def test_a_relative_path_is_refused_with_a_hint(
    client: httpx.AsyncClient, run: Run, field: str, path: str
) -> None:
    assert "give the absolute one" in (await refusal(client, run | {field: path}))[field]


async def test_a_rewarder_that_is_away_is_a_503_that_says_what_to_do(
    client: httpx.AsyncClient, run: Run, rewarder: FakeRewarder, redis: Redis
) -> None:
    rewarder.close()
    reply = await client.post("/v1/runs", json=run)
    assert reply.status_code == 503
    assert reply.json()["title"] == "Rewarder unavailable"
    assert "HEADRACE_REWARDER_URL" in reply.json()["detail"]
    assert await redis.zcard(RUNS) == 0


@pytest.mark.parametrize(
    ("status", "sentence"),
    [(401, "same HEADRACE_API_KEY"), (403, "gives this trainer: broken for this test"), (500, "it answered 500")],
)
async def test_a_rewarder_that_cannot_answer_is_a_503_that_says_why(
    client: httpx.AsyncClient, run: Run, rewarder: FakeRewarder, status: int, sentence: str
) -> None:
    rewarder.status = status
    reply = await client.post("/v1/runs", json=run)
    assert reply.status_code == 503
    assert sentence in reply.json()["detail"]


async def test_a_surprising_setting_causes_a_warning(client: httpx.AsyncClient, run: Run, dataset: DatasetFile) -> None:
    dataset.write('{"prompt": "1 + 1 ="}\n{"prompt": "2 + 2 ="}\n')
    body = (await client.post("/v1/runs", params={"dry_run": "1"}, json=run | {"save_steps": 10})).json()
    used, saved, column = body["warnings"]
    assert "need 8 prompts and the dataset has 2" in used
    assert "each is used up to 4 times" in used
    assert "save_steps=10 is more than the 4 steps" in saved
    assert "accuracy_reward asks for the column solution" in column


async def test_a_dataset_that_takes_too_long_is_a_503(settings: TrainerSettings, redis: Redis, run: Run) -> None:
    released = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(_config: Any) -> Any:
        asyncio.run_coroutine_threadsafe(released.wait(), loop).result(timeout=120)
        raise AssertionError("no client waits for this any longer")

    impatient = settings.model_copy(update={"dataset_check_timeout_s": 0.2})
    validator = RunValidator(impatient, dataset_check=hang)
    async with serving(make_api(impatient, redis, stopping=asyncio.Event(), validator=validator)) as client:
        reply = await client.post("/v1/runs", json=run)
        released.set()
    assert reply.status_code == 503
    assert "took longer than 0.2 s" in reply.json()["detail"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"learning_rate": NaN}',
        b'{"learning_rate": 1e999}',
        b'{"model": "\\ud800"}',
        b'{"model": "\xff"}',
        b"[" * 9_000,
    ],
)
async def test_a_body_that_is_not_json_is_a_400(client: httpx.AsyncClient, body: bytes) -> None:
    reply = await client.post("/v1/runs", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["title"] == "Malformed JSON"


@pytest.mark.parametrize("body", ["[]", '"run"', "null", "7"])
async def test_json_that_is_not_an_object_is_a_422(client: httpx.AsyncClient, body: str) -> None:
    reply = await client.post("/v1/runs", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 422
    assert "JSON object" in reply.json()["detail"]


async def test_deeply_nested_json_is_refused_without_echoing_it(client: httpx.AsyncClient, run: Run) -> None:
    deep = "[" * 900 + "]" * 900
    text = json.dumps(run)[:-1] + f', "model": {deep}, "extra": {deep}}}'
    reply = await client.post("/v1/runs", content=text, headers={"Content-Type": "application/json"})
    assert reply.status_code == 422
    assert "[[[" not in reply.text
    assert {error["field"] for error in reply.json()["errors"]} == {"model", "extra"}


async def test_a_huge_number_of_unknown_settings_is_refused_at_once(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/runs", json={f"key{n}": n for n in range(50_000)})
    assert reply.status_code == 422
    assert len(reply.content) < 1000


async def test_a_value_is_not_echoed(client: httpx.AsyncClient, run: Run) -> None:
    reply = await client.post("/v1/runs", json=run | {"learning_rate": "canary-secret"})
    assert reply.status_code == 422
    assert "canary" not in reply.text


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_huge_body_is_a_413(client: httpx.AsyncClient, is_chunked: bool) -> None:
    block = b"x" * 65536

    async def chunks() -> Any:
        for _ in range(40):
            yield block

    content: Any = chunks() if is_chunked else block * 40
    reply = await client.post("/v1/runs", content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 413
    assert reply.headers["content-type"] == "application/problem+json"


async def test_another_content_type_is_a_415(client: httpx.AsyncClient, run: Run) -> None:
    reply = await client.post("/v1/runs", content=json.dumps(run), headers={"Content-Type": "text/plain"})
    assert reply.status_code == 415
    assert "Content-Type: application/json" in reply.json()["detail"]


async def test_a_run_directory_that_cannot_be_made_is_a_503_and_no_run(
    client: httpx.AsyncClient, run: Run, settings: TrainerSettings, redis: Redis
) -> None:
    settings.runs_dir.write_text("a file where the directory should be")
    reply = await client.post("/v1/runs", json=run)
    assert reply.status_code == 503
    assert "HEADRACE_RUNS_DIR" in reply.json()["detail"]
    assert await redis.zcard(RUNS) == 0


async def test_the_arguments_of_reward_functions_are_checked_by_the_rewarder_and_against_the_columns(
    client: httpx.AsyncClient, run: Run, rewarder: FakeRewarder
) -> None:
    kwargs = {"accuracy_reward": {"strict": True}}
    reply = await client.post("/v1/runs", params={"dry_run": "true"}, json=run | {"reward_kwargs": kwargs})
    assert reply.status_code == 200, reply.text
    assert rewarder.bodies_seen == [{"reward_funcs": ["accuracy_reward"], "reward_kwargs": kwargs}]
    said = await refusal(client, run | {"reward_kwargs": {"accuracy_reward": {"solution": "4"}}})
    assert said["reward_kwargs"].startswith(
        "accuracy_reward is given 'solution' by reward_kwargs and by the dataset, which has a column of that name"
    )


async def test_a_run_names_files_below_the_roots_and_learns_nothing_of_others(
    client: httpx.AsyncClient, run: Run, tmp_path: Path
) -> None:
    link = tmp_path / "train-too.jsonl"
    link.symlink_to("/etc/shadow")
    disk = {"weight_transport": "disk"}
    for changes, field in (
        ({"dataset_name": str(link)}, "dataset_name"),
        ({"dataset_name": "/etc/passwd.jsonl"}, "dataset_name"),
        ({"dataset_name": "/etc"}, "dataset_name"),
        ({"model": "/etc/ssl"}, "model"),
        (disk | {"weight_dir": "/etc/cron.d"}, "weight_dir"),
        (disk | {"weight_dir": "file:///etc/cron.d"}, "weight_dir"),
        ({"vllm": {"speculative_config": {"method": "draft_model", "model": "/etc/ssl"}}}, "vllm"),
    ):
        reply = await client.post("/v1/runs", params={"dry_run": "true"}, json=run | changes)
        assert reply.status_code == 422, changes
        found = {error["field"]: error["message"] for error in reply.json()["errors"]}
        assert "that runs may name" in found[field]
        assert "root:" not in reply.text
