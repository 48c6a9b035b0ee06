"""The demo's parts for services in containers: deploy/demo/run.json trains on the files that `make` writes."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from headrace.demo import apart, task, warmup
from headrace.demo.model import make_model, make_tokenizer
from headrace.demo.warmup import WarmupProgress

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


def untrained(model_dir: Path, splits: task.Splits, *, seed: int, **_: Any) -> WarmupProgress:
    """Save an untrained model."""
    assert splits.test
    tokenizer = make_tokenizer()
    make_model(tokenizer, seed=seed).save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)
    return WarmupProgress(step=7, loss=1.0, validation_accuracy=0.0, teacher_like=0.0, seconds=1.0)


def test_an_evaluation_without_the_demos_files_is_refused_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert apart.main(["evaluate", str(tmp_path), str(tmp_path / "model")]) == 1
    missing = f"{tmp_path / 'test.jsonl'}: No such file or directory; `make` writes it"
    assert capsys.readouterr().err == f"python -m headrace.demo.apart evaluate: {missing}\n"


def test_the_demo_makes_the_files_that_the_documented_run_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warmup, "warm_up", untrained)
    monkeypatch.setattr(task, "NUM_TEST", 16)
    directory = tmp_path / "demo"

    assert apart.main(["make", str(directory)]) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert apart.main(["evaluate", str(directory), str(directory / "model")]) == 0
    evaluated = json.loads(capsys.readouterr().out.splitlines()[-1])

    assert made["steps"] == 7
    assert evaluated == {"accuracy": made["accuracy"], "prompts": 16}
    run = json.loads((DEPLOY / "demo" / "run.json").read_text(encoding="utf-8"))
    for named in (run["model"], run["dataset_name"]):
        assert (tmp_path / Path(named).relative_to("/models")).exists()
    trained = {json.loads(line)["prompt"] for line in (directory / "train.jsonl").read_text().splitlines()}
    asked = {json.loads(line)["prompt"] for line in (directory / "test.jsonl").read_text().splitlines()}
    assert not trained & asked
