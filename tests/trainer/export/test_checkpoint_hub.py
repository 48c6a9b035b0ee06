"""The files that a run leaves, and their upload, by the real huggingface_hub to a hub on this machine."""

import asyncio
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from services.trainer.data.prompt_encoder import load_tokenizer
from services.trainer.disk_room import Room
from services.trainer.export.final_model import leave_model
from services.trainer.run_files import RunFiles
from services.trainer.telemetry.run_log import RunLog
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
from tests.checkpoints import save_checkpoint
from tests.trainer.cores import make_config, make_core, random_rows, weights
from tests.trainer.export.fake_hub import TOKEN, FakeHub, fake_hub

RUN_ID = "run-7f"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")
"""Warnings that huggingface_hub itself causes."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub() as served:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", served.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


class Run:
    """A run of one step whose last checkpoint is on disk."""

    def __init__(self, redis: Redis, root: Path, model: Path, **settings: Any) -> None:
        self.config: RunConfig = make_config(model, learning_rate=1e-3, **settings)
        self.files = RunFiles(root / RUN_ID)
        self.best_step: int | None = None
        self.chosen_steps: list[int] = []
        self._redis = redis
        self.log = RunLog(redis, keys=RunKeys(RUN_ID), run_dir=self.files.run_dir)
        (self.files.run_dir / "config.json").write_text(json.dumps(self.config.model_dump(mode="json")))
        core = make_core(model, learning_rate=1e-3)
        core.accumulate(random_rows(4))
        core.step()
        self.weights = weights(core)
        save_checkpoint(self.files.checkpoints, core, {}, step=1, keep=1, tokenizer=load_tokenizer(str(model)))

    async def end(self, *, terminate: asyncio.Event | None = None) -> str | None:
        return await leave_model(
            self.files,
            self.config,
            run_id=RUN_ID,
            step=1,
            best_step=self.best_step,
            chose=self.chosen_steps.append,
            run_log=self.log,
            room=Room(),
            terminate=terminate or asyncio.Event(),
        )

    async def messages(self) -> list[str]:
        events: Any = await self._redis.xrange(RunKeys(RUN_ID).events)
        return [json.loads(fields[b"data"])["message"] for _, fields in events if fields[b"kind"] == b"log"]


async def test_without_push_to_hub_the_model_is_in_the_run_directory_and_the_hub_is_not_called(
    redis: Redis, hub: FakeHub, tiny_model: Path, tmp_path: Path
) -> None:
    run = Run(redis, tmp_path, tiny_model)
    assert await run.end() == ""
    loaded = AutoModelForCausalLM.from_pretrained(run.files.model)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, run.weights[name]), name
    assert hub.files == {}


async def test_a_best_checkpoint_that_is_damaged_or_was_not_found_is_replaced_by_the_last_with_a_warning(
    redis: Redis, hub: FakeHub, tiny_model: Path, tmp_path: Path
) -> None:
    evaluated = {"eval_dataset_name": "/data/eval.jsonl", "eval_steps": 1, "load_best_model_at_end": True}
    run = Run(redis, tmp_path, tiny_model, **evaluated)
    run.best_step = 0
    warning = await run.end()
    assert warning is not None
    assert warning.startswith(
        "the model has the weights of the last step, 1, because the best checkpoint, of step 0, is damaged: "
    )
    assert await run.messages() == [warning]
    assert (run.files.model / "model.safetensors").is_file()
    run.best_step = None
    assert await run.end() == (
        "the model has the weights of the last step, 1, because no evaluation measured eval_reward"
    )
    run.best_step = 1
    assert await run.end() == ""
    assert run.chosen_steps == [1, 1, 1]


async def test_the_model_is_uploaded_with_its_card_and_what_was_uploaded_loads(
    redis: Redis, hub: FakeHub, tiny_model: Path, tmp_path: Path
) -> None:
    run = Run(redis, tmp_path, tiny_model, push_to_hub=True, hub_model_id="group/better", hub_private_repo=True)
    assert await run.end() == ""
    assert hub.private == {"group/better"}
    assert hub.messages == [f"headrace run {RUN_ID}"]
    assert await run.messages() == [
        f"uploading {run.files.model} to group/better",
        f"uploaded the model: {hub.url}/group/better",
    ]
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    for path, content in hub.files["group/better"].items():
        (downloaded / path).write_bytes(content)
    loaded = AutoModelForCausalLM.from_pretrained(downloaded)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, run.weights[name]), name
    assert 'from_pretrained("group/better"' in (downloaded / "README.md").read_text()


async def test_the_files_of_earlier_models_in_a_repository_are_removed_and_others_kept(
    redis: Redis, hub: FakeHub, tiny_model: Path, tmp_path: Path
) -> None:
    adapters = {"adapter_config.json", "adapter_model.safetensors"}
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}
    templates = {"chat_template.json", "additional_chat_templates/rag.jinja"}
    mine = {"notes.md", "LICENSE", "onnx/config.json", "older/model.safetensors"}
    hub.files["group/better"] = dict.fromkeys(adapters | shards | templates | mine | {"config.json"}, b"{}")
    run = Run(redis, tmp_path, tiny_model, push_to_hub=True, hub_model_id="group/better")
    assert await run.end() == ""
    uploaded = {path.name for path in run.files.model.iterdir()}
    assert {"config.json", "model.safetensors"} <= uploaded
    assert set(hub.files["group/better"]) == uploaded | mine
    assert hub.files["group/better"]["config.json"] == (run.files.model / "config.json").read_bytes()
    assert len(hub.messages) == 1, "the repository never has half a model"


async def test_a_name_without_an_owner_becomes_the_tokens_owners(
    redis: Redis, hub: FakeHub, tiny_model: Path, tmp_path: Path
) -> None:
    run = Run(redis, tmp_path, tiny_model, push_to_hub=True, name="better")
    assert await run.end() == ""
    assert list(hub.files) == ["someone/better"]
    assert hub.private == set()
    assert b"vllm serve someone/better" in hub.files["someone/better"]["README.md"]


@pytest.mark.parametrize("trouble", ["refused", "wrong token", "no token", "away"])
async def test_an_upload_that_fails_leaves_the_model_the_reason_and_the_command_that_does_it_by_hand(
    redis: Redis, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path, trouble: str
) -> None:
    if trouble == "refused":
        hub.refused = (403, "You have exceeded your storage limit")
    elif trouble == "wrong token":
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    elif trouble == "no token":
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    said = {
        "refused": "You have exceeded your storage limit",
        "wrong token": "401 Unauthorized",
        "no token": "set HF_TOKEN for the trainer, or run `hf auth login`",
        "away": "Connection refused",
    }[trouble]
    run = Run(redis, tmp_path, tiny_model, push_to_hub=True, hub_model_id="group/better", hub_private_repo=True)
    warning = await run.end()
    assert warning is not None
    assert said in warning
    by_hand = shlex.join(["hf", "upload", "group/better", str(run.files.model), ".", "--private"])
    assert f"To upload it: {by_hand} --delete=adapter_config.json " in warning
    assert (await run.messages())[-1] == warning
    assert AutoModelForCausalLM.from_pretrained(run.files.model).num_parameters() > 0


async def test_a_process_asked_to_end_gives_the_upload_up_and_the_next_one_makes_it(
    redis: Redis, hub: FakeHub, tiny_model: Path, tmp_path: Path
) -> None:
    run = Run(redis, tmp_path, tiny_model, push_to_hub=True, hub_model_id="group/better")
    hub.hold.clear()
    terminate = asyncio.Event()
    ending = asyncio.create_task(run.end(terminate=terminate))
    await asyncio.wait_for(asyncio.to_thread(hub.asked_to_store.wait, 20), timeout=120)
    terminate.set()
    assert await asyncio.wait_for(ending, timeout=120) is None
    hub.hold.set()
    assert await run.end() == ""
    assert "model.safetensors" in hub.files["group/better"]


def test_the_header_of_the_card_is_what_the_hub_reads(tmp_path: Path) -> None:
    from services.trainer.export.model_card import RunFacts, model_card

    config = RunConfig(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        model_revision="abc1234",
        dataset_name="openai/gsm8k",
        reward_funcs=["accuracy_reward", "my.module:brevity"],
        reward_weights=[1.0, 0.5],
        beta=0.04,
    ).model_dump(mode="json")
    metrics = {"reward": 0.71249, "rewards/accuracy_reward/mean": 0.7, "num_tokens": 12345678.0, "kl": float("nan")}
    card = model_card(RunFacts(config=config, metrics=metrics, run_id="run-7f", step=200), title="group/better")
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header) == {
        "base_model": "Qwen/Qwen2.5-0.5B-Instruct",
        "datasets": ["openai/gsm8k"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "headrace", "reinforcement-learning"],
    }
    for line in (
        "* Base model: `Qwen/Qwen2.5-0.5B-Instruct` at revision `abc1234`",
        "* Rewards: `accuracy_reward`, `my.module:brevity` (weight 0.5)",
        "| `beta` | 0.04 |",
        "| `reward` | 0.71249 |",
        "| `num_tokens` | 12,345,678 |",
    ):
        assert line in text.splitlines()
    assert "kl" not in text.split("## Metrics")[1], "an invalid number is left out"


def test_a_card_names_no_path_of_the_machine(tmp_path: Path) -> None:
    from services.trainer.export.model_card import RunFacts, model_card

    private = tmp_path / "private"
    config = RunConfig(
        model=str(private / "start"),
        dataset_name=str(private / "rows.jsonl"),
        eval_dataset_name=str(private / "eval.jsonl"),
        eval_steps=5,
        reward_funcs=["accuracy_reward", str(private / "rm")],
        reward_weights=[1, 0.5],
        weight_transport="disk",
        weight_dir=str(private / "weights"),
        vllm={"speculative_config": {"model": str(private / "draft")}},
    )
    card = model_card(RunFacts(config=config.model_dump(mode="json")), title="model")
    assert "private" not in card
    assert "`rows.jsonl` (a local path)" in card
    assert "Rewards: `accuracy_reward`, `rm` (a local path) (weight 0.5)" in card
    assert "| `eval_dataset_name` | `eval.jsonl` (a local path) |" in card
    assert "`draft` (a local path)" in card
    header = yaml.safe_load(card.split("---\n")[1])
    assert not {"base_model", "datasets"} & header.keys()


def test_the_evaluation_rows_of_a_script_are_no_file_on_its_card() -> None:
    from services.trainer.export.model_card import RunFacts, model_card

    inputs = "/home/me/.headrace/inputs"
    config = RunConfig(
        model="Qwen/Qwen3-0.6B",
        dataset_name=f"{inputs}/data-0123456789ab.parquet",
        eval_dataset_name=f"{inputs}/data-ba9876543210.parquet",
        eval_steps=5,
        reward_funcs=["accuracy_reward"],
    )
    card = model_card(RunFacts(config=config.model_dump(mode="json")), title="model")
    assert "* Data: rows of a script" in card
    assert "| `eval_dataset_name` | rows of a script |" in card
    assert ".headrace" not in card
