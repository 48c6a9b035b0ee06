"""Mistakes in a script's arguments are refused before services start."""

from pathlib import Path
from typing import Any

import pytest

from headrace.grpo import script_run
from headrace.grpo.argument_error import ArgumentError
from headrace.grpo.grpo_trainer import GRPOTrainer
from shared.run_options.grpo_config import GRPOConfig

pytestmark = pytest.mark.unit

ROWS = [{"prompt": "2 + 2 ="}, {"prompt": "3 + 3 ="}]


class StartedError(Exception):
    """Services are about to start."""


@pytest.fixture(autouse=True)
def no_services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def start(**_: Any) -> None:
        raise StartedError

    monkeypatch.setattr(script_run, "find_services", start)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_URL", raising=False)
    monkeypatch.delenv("HEADRACE_STATE_DIR", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def brevity(completions: list[str], **columns: Any) -> list[float]:
    return [0.0 for _ in completions]


def train(data: Any = ROWS, *, model: str = "org/model", eval_dataset: Any = None, **options: Any) -> None:
    args = GRPOConfig(output_dir="out", **options)
    GRPOTrainer(model, brevity, args, data, eval_dataset=eval_dataset).train()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"per_device_train_batch_size": 6, "num_generations": 4}, "num_generations"),
    ],
)
def test_the_constructor_refuses_options_that_a_run_does_not_have(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        GRPOTrainer("org/model", brevity, GRPOConfig(**options), ROWS)


def test_services_start_for_a_script_without_mistakes() -> None:
    evaluated: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 5, "eval_dataset": ROWS[:1]}
    for options in (dict[str, Any](), evaluated):
        with pytest.raises(StartedError):
            train(**options)
    with pytest.raises(StartedError):
        train([{"question": "2 + 2 ="}], run_options={"rename_columns": {"question": "prompt"}})
    with pytest.raises(StartedError):
        train(iter(ROWS), max_steps=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"loss_type": "dapoo"}, "loss_type"),
        ({"run_options": {"max_eval_prompt": 3}}, "max_eval_prompt: .*did you mean max_eval_prompts"),
        ({"reward_weights": [1.0, 2.0]}, r"Number of reward weights \(2\) must match number of reward functions \(1\)"),
        ({"fp16": True}, "fp16: a run has bfloat16"),
        ({"eval_strategy": "steps", "eval_steps": 5}, "eval_dataset is missing"),
        ({"eval_strategy": "steps", "eval_dataset": {"a": ROWS, "b": ROWS}}, "eval_dataset has several data sets"),
        ({"data": [{"question": "2 + 2 ="}]}, r"train_dataset has no column prompt, but question; rename one: train_"),
        ({"data": iter(ROWS)}, "train_dataset has no length: set max_steps"),
    ],
)
def test_a_mistake_is_refused_before_services_start(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        train(**arguments)


def test_a_data_set_without_prompts_is_refused_by_its_columns() -> None:
    datasets = pytest.importorskip("datasets")
    with pytest.raises(ValueError, match="train_dataset has no column prompt, but question, answer; rename one"):
        train(datasets.Dataset.from_list([{"question": "2 + 2 =", "answer": "4"}]))
    with pytest.raises(ValueError, match="eval_dataset has no column prompt, but question"):
        train(eval_on_start=True, eval_dataset=datasets.Dataset.from_list([{"question": "2 + 2 ="}]))


@pytest.mark.parametrize("name", ["./tiny-qwen33", "/none/such/model", "~/no-model", "models/small/none"])
def test_a_path_of_no_model_is_refused_before_services_start(name: str) -> None:
    with pytest.raises(ValueError, match=f"model: there is no directory {name}"):
        train(model=name)


def test_a_misspelt_directory_is_refused_if_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tiny-qwen3").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(StartedError):  # the hub may have it
        train(model="tiny-qwen33")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"no directory tiny-qwen33, and the hub.* did you mean tiny-qwen3\?"):
        train(model="tiny-qwen33")
    monkeypatch.setenv("HEADRACE_URL", "http://elsewhere")  # which may have it
    with pytest.raises(StartedError):
        train(model="tiny-qwen33")
