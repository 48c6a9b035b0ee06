"""`headrace export`: a checkpoint as a model directory, with real models."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headrace.cli.command_line import main
from services.trainer.checkpoints.manifest import MANIFEST_FILE, write_manifest
from services.trainer.checkpoints.shards import Part, ShardError, write_shards
from services.trainer.data.prompt_encoder import load_tokenizer
from services.trainer.export import export
from services.trainer.export.export import export_checkpoint
from services.trainer.export.model_card import RunFacts
from shared.beginning import BEGINNING_FILE, Beginning
from tests.checkpoints import save_checkpoint
from tests.headrace.scripted_api import serving
from tests.tiny_model import make_tiny_tokenizer
from tests.trainer.cores import assert_odd_generation, copy_with_odd_generation, make_config, make_core, random_rows
from tests.trainer.tensor_files import load_file


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose head is its embedding."""
    directory = tmp_path_factory.mktemp("tied") / "model"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    make_tiny_tokenizer().save_pretrained(directory)
    return directory


def saved_run(run_dir: Path, model: Path, *, dtype: str = "float32") -> tuple[Path, dict[str, Tensor]]:
    """Return the checkpoint of step 1 of a run, and its float32 weights."""
    settings: dict[str, Any] = {"learning_rate": 1e-3, "dtype": dtype}
    core = make_core(model, **settings)
    core.accumulate(random_rows(4))
    core.step()
    run_dir.mkdir()
    config = make_config(model, **settings).model_dump(mode="json")
    (run_dir / "config.json").write_text(json.dumps(config))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "reward": n / 8}) + "\n" for n in (1, 2)))
    path = save_checkpoint(run_dir / "checkpoints", core, {}, step=1, keep=2, tokenizer=load_tokenizer(str(model)))
    return path, {name: tensor.detach().clone() for name, tensor in core.lm.state_dict().items()}


def logits(model: Path) -> Tensor:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    with torch.no_grad():
        output: Tensor = loaded(input_ids=torch.arange(4, 20)[None]).logits
    return output


def test_an_exported_model_computes_the_same_as_the_trainer_to_the_last_bit(tiny_model: Path, tmp_path: Path) -> None:
    checkpoint, trained = saved_run(tmp_path / "run-1", tiny_model)
    assert main(["export", str(checkpoint), "--to", str(tmp_path / "out")]) == 0
    reference = AutoModelForCausalLM.from_pretrained(tiny_model)
    reference.load_state_dict(trained)
    with torch.no_grad():
        expected = reference(input_ids=torch.arange(4, 20)[None]).logits
    assert torch.equal(logits(tmp_path / "out"), expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("abc")["input_ids"] == [4, 5, 6]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == ["model.safetensors"]


def test_all_chat_templates_of_a_tokenizer_are_exported(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    tokenizer.save_pretrained(model)
    checkpoint, _ = saved_run(tmp_path / "run-1", model)
    (checkpoint / "model" / "emoji.json").write_text("{}")  # as some tokenizers have
    for _ in range(2):  # the second time, over the first
        export.check_exportable(checkpoint, tmp_path / "out", is_verified=True)
        export_checkpoint(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "emoji.json").is_file()
    assert load_tokenizer(str(tmp_path / "out")).chat_template == {"default": "plain", "tool_use": "with tools"}


def test_the_newest_checkpoint_is_exported_although_the_training_prunes_the_one_that_is_read(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = saved_run(tmp_path / "run-1", tiny_model)
    run_facts = export.run_facts

    def facts_while_it_trains(checkpoint: Path) -> RunFacts:
        facts = run_facts(checkpoint)
        if checkpoint == first:
            tokenizer = load_tokenizer(str(tiny_model))
            save_checkpoint(first.parent, make_core(tiny_model), {}, step=2, keep=1, tokenizer=tokenizer)
        return facts

    monkeypatch.setattr(export, "run_facts", facts_while_it_trains)
    assert main(["export", str(tmp_path / "run-1"), "--to", str(tmp_path / "out")]) == 0
    assert "step_00000002" in capsys.readouterr().out
    assert torch.equal(logits(tmp_path / "out"), logits(tiny_model))


def test_exporting_the_newest_checkpoint_names_a_better_one(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, to = tmp_path / "run-1", str(tmp_path / "out")
    best, _ = saved_run(run_dir, tiny_model)
    newest = shutil.copytree(best, best.with_name("step_00000002"))
    config = json.loads((run_dir / "config.json").read_text())
    config |= {"eval_dataset_name": "e", "eval_steps": 1, "metric_for_best_model": "eval_reward"}
    (run_dir / "config.json").write_text(json.dumps(config))
    for rewards, said in (
        ((0.9, 0.5), f"note: the best checkpoint is another one: headrace export {best} --to DIR\n"),
        ((0.5, 0.9), ""),
    ):
        evaluations = [{"step": step, "eval_reward": reward} for step, reward in enumerate(rewards, start=1)]
        (run_dir / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
        assert main(["export", str(run_dir), "--to", to]) == 0
        assert capsys.readouterr().out == f"exported {newest} to {to}\n{said}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_exported_weights_are_the_pushed_weights(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    core = make_core(tiny_model, learning_rate=1e-3, dtype=dtype)
    core.accumulate(random_rows(4))
    core.step()
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / "config.json").write_text(json.dumps({"dtype": dtype}))
    checkpoint = save_checkpoint(tmp_path / "run-1" / "checkpoints", core, {}, step=1, keep=1)
    exported = AutoModelForCausalLM.from_pretrained(export_checkpoint(checkpoint, tmp_path / "out"), dtype="auto")
    pushed = dict(core.named_weights())
    loaded = {name: tensor for name, tensor in exported.state_dict().items() if name in pushed}
    assert {tensor.dtype for tensor in pushed.values()} == {getattr(torch, dtype)}
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {n: t.dtype for n, t in pushed.items()}
    assert all(torch.equal(tensor, pushed[name]) for name, tensor in loaded.items())


def test_a_model_whose_generation_settings_contradict_each_other_is_exported_all_the_same(
    tiny_model: Path, tmp_path: Path
) -> None:
    checkpoint, _ = saved_run(tmp_path / "run-1", copy_with_odd_generation(tiny_model, tmp_path / "model"))
    exported = export_checkpoint(checkpoint, tmp_path / "out")
    assert_odd_generation(exported)
    assert torch.equal(logits(exported), logits(checkpoint / "model"))


def reshard(checkpoint: Path, num_ranks: int) -> None:
    """Reshard a checkpoint's model as this many ranks would have written it."""
    model = checkpoint / "model"
    whole = AutoModelForCausalLM.from_pretrained(model).state_dict()
    whole.pop("lm_head.weight")  # it is the embedding
    for path in (*model.glob("shard-*"), model / "model.safetensors.index.json"):
        path.unlink()
    for rank in range(num_ranks):
        parts: dict[str, Part] = {}
        for name, tensor in whole.items():
            chunk = -(-len(tensor) // num_ranks)
            rows = tensor[rank * chunk : (rank + 1) * chunk].clone()
            if rows.numel():
                parts[name] = Part(rows, (rank * chunk, *(0,) * (tensor.dim() - 1)))
        write_shards(model, parts, rank=rank, num_ranks=num_ranks)
    (checkpoint / MANIFEST_FILE).unlink()
    write_manifest(checkpoint)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_of_several_ranks_and_tied_weights_become_one_file_in_the_dtype_of_the_run(
    tied_model: Path, tmp_path: Path, dtype: str
) -> None:
    checkpoint, trained = saved_run(tmp_path / "run-1", tied_model, dtype=dtype)
    expected = logits(checkpoint / "model")
    reshard(checkpoint, 3)
    exported = export_checkpoint(checkpoint, tmp_path / "out")
    assert json.loads((exported / "config.json").read_text())["dtype"] == dtype
    loaded = AutoModelForCausalLM.from_pretrained(exported, dtype="auto").state_dict()
    for name, tensor in trained.items():
        assert torch.equal(loaded[name], tensor.to(getattr(torch, dtype))), name
    if dtype == "float32":
        assert torch.equal(logits(exported), expected)


def test_the_experts_of_a_mixture_are_exported_under_the_names_of_the_hub(tmp_path: Path) -> None:
    """The experts' tensors: transformers fuses them on loading, and vLLM reads them one by one."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_experts=3,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    checkpoint = save_checkpoint(tmp_path / "checkpoints", make_core(tmp_path / "model"), {}, step=0, keep=1)
    exported = export_checkpoint(checkpoint, tmp_path / "out")
    expected = load_file(tmp_path / "model" / "model.safetensors")
    found = load_file(exported / "model.safetensors")
    assert "model.layers.0.mlp.experts.2.down_proj.weight" in found
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_a_run_directory_means_its_newest_whole_checkpoint_and_its_card_has_the_numbers_of_that_step(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, _ = saved_run(tmp_path / "run-1", tiny_model)
    damaged = checkpoint.with_name("step_00000002")
    shutil.copytree(checkpoint, damaged)
    shard = next((damaged / "model").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["export", str(tmp_path / "run-1"), "--to", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"exported {checkpoint} to {tmp_path / 'out'}\n"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "optimizer step 1 of run `run-1`" in card
    assert "| `reward` | 0.125 |" in card
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_a_checkpoint_that_was_moved_away_from_its_run_is_exported_without_its_story(
    tiny_model: Path, tmp_path: Path
) -> None:
    checkpoint, _ = saved_run(tmp_path / "run-1", tiny_model)
    moved = tmp_path / "elsewhere"
    checkpoint.rename(moved)
    card = (export_checkpoint(moved, tmp_path / "out") / "README.md").read_text()
    assert "optimizer step 1 of a run" in card
    assert "## Settings" not in card
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32


@pytest.mark.parametrize(
    ("beginning", "sentence"),
    [
        (Beginning("checkpoint", "/d", "run-0:7", run_id="run-0", step=7), "The run began from step 7 of run-0."),
        (
            Beginning("model", "/home/me/secret/theirs", "/home/me/secret/theirs", weights_only=True),
            "The run began from `theirs` (a local path), weights only.",
        ),
    ],
)
def test_the_card_says_where_the_run_began_and_shows_no_paths(
    tiny_model: Path, tmp_path: Path, beginning: Beginning, sentence: str
) -> None:
    checkpoint, _ = saved_run(tmp_path / "run-1", tiny_model)
    (tmp_path / "run-1" / BEGINNING_FILE).write_bytes(msgspec.json.encode(beginning))
    card = (export_checkpoint(checkpoint, tmp_path / "out") / "README.md").read_text()
    assert sentence in card
    assert "secret" not in card


@pytest.mark.parametrize("left", ["", '{"num_iterations": 1, "learning_r', "[]"])
def test_a_run_whose_options_are_damaged_keeps_its_model(tiny_model: Path, tmp_path: Path, left: str) -> None:
    checkpoint, _ = saved_run(tmp_path / "run-1", tiny_model)
    (tmp_path / "run-1" / "config.json").write_text(left)
    card = (export_checkpoint(checkpoint, tmp_path / "out") / "README.md").read_text()
    assert "## Settings" not in card
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32


MISTAKES = (
    "truncated",
    "not a checkpoint",
    "no checkpoints",
    "not empty",
    "a run",
    "a user's file",
    "a user's template",
    "here",
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_with_a_sentence_and_nothing_is_written(
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    mistake: str,
) -> None:
    checkpoint, _ = saved_run(tmp_path / "run-1", tiny_model)
    named, to = checkpoint, tmp_path / "out"
    if mistake == "truncated":
        shard = next((checkpoint / "optimizer").glob("shard-*"))
        shard.write_bytes(shard.read_bytes()[:-1])
        said = f"{shard} has"
    elif mistake == "not a checkpoint":
        named, said = tmp_path, "is neither a checkpoint"
    elif mistake == "no checkpoints":
        shutil.rmtree(checkpoint)
        named, said = tmp_path / "run-1", "no complete checkpoint found"
    elif mistake == "a run":
        to, said = tmp_path / "run-1", "contains other files than a model"
    elif mistake == "a user's file":
        shutil.copytree(tiny_model, to)
        (to / "headrace-run.json").write_text("{}")
        said = "contains other files than a model, such as headrace-run.json"
    elif mistake == "a user's template":
        shutil.copytree(tiny_model, to)
        (to / "additional_chat_templates").mkdir()
        (to / "additional_chat_templates" / "notes.txt").touch()
        said = "such as additional_chat_templates/notes.txt"
    elif mistake == "here":
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        to, said = Path(), "is the current directory"
    else:
        to, said = tiny_model.parent, "contains other files than a model"
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", str(named), "--to", str(to)]) == 1
    assert said in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_is_found_although_a_directory_has_its_name(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_run(tmp_path / "run-1", tiny_model)
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "math").mkdir()
    with serving(lambda _: {"run_dir": str(tmp_path / "run-1")}) as api:
        for _ in range(2):  # into an empty directory, and over the model of the first time
            assert main(["export", "math", "--to", "math", "--url", api.url]) == 0
    assert "exported" in capsys.readouterr().out
    assert main(["export", "math", "--to", "other", "--state-dir", str(tmp_path / "none")]) == 1
    said = capsys.readouterr().err
    assert "math is neither a checkpoint" in said
    assert "no headrace service found" in said


def test_a_run_and_a_step_name_a_checkpoint_as_for_submit(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, _ = saved_run(tmp_path / "run-1", tiny_model)
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(lambda asked: {"run_dir": str(tmp_path / "run-1")} if asked.path == "/v1/runs/math" else {}) as api:
        for which, said in (
            ("2", "run-1 has no checkpoint of step 2; it has 1"),
            ("best", "the best checkpoint of run-1 is not known"),
        ):
            assert main(["export", f"math:{which}", "--to", str(tmp_path / "out"), "--url", api.url]) == 1
            assert said in capsys.readouterr().err
        assert main(["export", "math:1", "--to", str(tmp_path / "out"), "--url", api.url]) == 0
    assert capsys.readouterr().out == f"exported {checkpoint} to {tmp_path / 'out'}\n"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_the_modes_of_all_files_follow_the_umask(tiny_model: Path, tmp_path: Path, umask: int, mode: int) -> None:
    checkpoint, _ = saved_run(tmp_path / "run-1", tiny_model)
    before = os.umask(umask)
    try:
        out = export_checkpoint(checkpoint, tmp_path / "out")
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in out.iterdir()} == dict.fromkeys(os.listdir(out), mode)
    assert (out / "model.safetensors").is_file()


def test_an_export_that_fails_leaves_the_model_that_was_there(tiny_model: Path, tmp_path: Path) -> None:
    checkpoint, _ = saved_run(tmp_path / "run-1", tiny_model)
    out = export_checkpoint(checkpoint, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for path in (checkpoint / "model").glob("shard-*"):
        path.unlink()
    with pytest.raises(ShardError, match="contains no tensors"):
        export_checkpoint(checkpoint, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run-1"]


def test_a_model_is_on_the_disk_before_it_takes_its_place_and_before_the_old_one_is_removed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, _ = saved_run(tmp_path / "run-1", tiny_model)
    out = export_checkpoint(checkpoint, tmp_path / "out")
    events: list[str] = []
    sync = os.fsync

    def synced(descriptor: int) -> None:
        sync(descriptor)
        there = sorted(path.name for path in tmp_path.iterdir() if path != tmp_path / "run-1")
        events.append(f"{Path(os.readlink(f'/proc/self/fd/{descriptor}')).name} while {there}")

    monkeypatch.setattr(os, "fsync", synced)
    export_checkpoint(checkpoint, out)
    names = [path.name for path in out.iterdir()]
    before = "['.out.writing', 'out']"
    assert sorted(events[:-1]) == sorted(f"{name} while {before}" for name in [*names, ".out.writing"])
    assert events[-1] == f"{tmp_path.name} while ['.out.replaced', 'out']"
