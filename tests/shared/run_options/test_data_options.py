"""Options of data sets: exactly one way to name them, and an evaluation that has both prompts and a schedule."""

from typing import Any

import pytest

from shared.errors import UserError
from shared.run_options.data import DatasetSource
from shared.run_options.run_config import RunConfig, parse_run_config

pytestmark = pytest.mark.unit

BASE: dict[str, Any] = {"model": "m", "reward_funcs": ["accuracy_reward"]}
ONE: dict[str, Any] = {**BASE, "dataset_name": "org/data"}
MIXED: dict[str, Any] = {**BASE, "datasets": [{"path": "/a.jsonl"}, {"path": "org/b", "name": "main", "split": "all"}]}


def refused(raw: dict[str, Any]) -> UserError:
    with pytest.raises(UserError) as caught:
        parse_run_config(raw)
    return caught.value


def test_a_missing_data_set_is_asked_for_by_the_name_most_people_use() -> None:
    error = refused(BASE)
    assert error.field == "dataset_name"
    assert str(error).startswith(
        "dataset_name: is required: Path of a .jsonl, .json, .csv or .parquet file, or of a directory"
    )
    assert "`datasets`" in str(error)


def test_one_data_set_and_a_mixture_are_both_lists_of_sources() -> None:
    assert parse_run_config(ONE | {"dataset_config": "main"}).train_sources() == {
        "dataset_name": DatasetSource(path="org/data", name="main", split="train")
    }
    assert parse_run_config(MIXED).train_sources() == {
        "datasets.0": DatasetSource(path="/a.jsonl"),
        "datasets.1": DatasetSource(path="org/b", name="main", split="all"),
    }


def test_a_mixture_survives_being_stored_as_json() -> None:
    config = parse_run_config({**MIXED, "rename_columns": {"question": "prompt"}, "columns": ["answer"]})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


WRONG: list[tuple[dict[str, Any], str]] = [
    (ONE | {"datasets": [{"path": "x"}]}, "dataset_name: is set, and `datasets` too"),
    (ONE | {"dataset_name": ""}, "dataset_name: is required"),
    (BASE | {"datasets": []}, "datasets: .*at least 1 item"),
    (BASE | {"datasets": [{"pth": "x"}]}, "datasets.0.path: is required: Path of"),
    (BASE | {"datasets": [{"path": "x", "wieght": 1.0}]}, "datasets.0.wieght: there is no such setting"),
    (BASE | {"datasets": [{"path": "x", "fractoin": 1.0}]}, "datasets.0.fractoin: .*did you mean fraction"),
    (BASE | {"datasets": [{"path": "x", "fraction": 0.0}]}, "datasets.0.fraction: .*greater than 0"),
    (BASE | {"datasets": [{"path": "x", "fraction": 1.0}, {"path": "y"}]}, "set for x and not for y"),
    (BASE | {"datasets": [{"path": "/a.jsonl"}, {"path": "/a.jsonl", "split": "b"}]}, "/a.jsonl is listed twice"),
    (MIXED | {"dataset_config": "main"}, "in `datasets` give each entry its `name`"),
    (MIXED | {"dataset_train_split": "all"}, "in `datasets` give each entry its `split`"),
    (MIXED | {"dataset_test_split": "test", "eval_steps": 5}, "name the one to evaluate on as eval_dataset_name"),
    (ONE | {"rename_columns": {"a": "a"}}, "rename_columns: 'a' is renamed to itself"),
    (
        ONE | {"chat_template_kwargs": {"tokenize": False}},
        "chat_template_kwargs: tokenize cannot be set, because it decides how",
    ),
    (ONE | {"eval_steps": 5}, "eval_steps is set, but there is nothing to evaluate on"),
    (ONE | {"eval_on_start": True}, "eval_on_start is set, but there is nothing to evaluate on"),
    (ONE | {"num_generations_eval": 1}, "num_generations_eval is set, but there is nothing to evaluate on"),
    (ONE | {"eval_steps": 5, "num_generations_eval": 1025}, "num_generations_eval: must be at most 1024"),
    (ONE | {"eval_dataset_name": "/b.jsonl"}, "eval_dataset_name is set, but nothing says when"),
    (ONE | {"dataset_test_split": "test"}, "dataset_test_split is set, but nothing says when"),
    (ONE | {"dataset_test_split": "train", "eval_steps": 5}, "names training data .org/data, split train"),
    (
        BASE | {"dataset_name": "/a.jsonl", "dataset_test_split": "test", "eval_steps": 5},
        "is a file, which has none",
    ),
    (MIXED | {"eval_dataset_name": "/a.jsonl", "eval_steps": 5}, "names training data ./a.jsonl"),
]


@pytest.mark.parametrize(("raw", "sentence"), WRONG)
def test_incompatible_options_are_refused_with_the_reason(raw: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_run_config(raw)


def test_other_rows_of_a_data_set_that_is_trained_on_may_be_mixed_and_evaluated_on() -> None:
    entries = [{"path": "org/b", "split": "train"}, {"path": "org/b", "split": "extra"}]
    config = parse_run_config({**BASE, "datasets": entries, "eval_dataset_name": "org/b", "eval_steps": 5})
    assert config.eval_source() == ("eval_dataset_name", DatasetSource(path="org/b", split="test"))


def test_an_evaluation_split_is_of_the_data_set_that_is_trained_on_unless_another_is_named() -> None:
    split = parse_run_config(ONE | {"dataset_config": "main", "dataset_test_split": "held_out", "eval_steps": 5})
    assert split.eval_source() == ("dataset_test_split", DatasetSource(path="org/data", name="main", split="held_out"))
    named = parse_run_config(
        ONE | {"dataset_config": "main", "eval_dataset_name": "org/other", "eval_dataset_config": "x", "eval_steps": 5}
    )
    assert named.eval_source() == ("eval_dataset_name", DatasetSource(path="org/other", name="x", split="test"))


@pytest.mark.parametrize(
    ("raw", "setting"),
    [
        ({"dataset_name": "/a.jsonl", "dataset_config": "main"}, "dataset_config"),
        ({"dataset_name": "/a.parquet", "dataset_train_split": "all"}, "dataset_train_split"),
        ({"datasets": [{"path": "x"}, {"path": "/a.jsonl", "name": "main"}]}, "datasets.1.name"),
        ({"datasets": [{"path": "/a.jsonl", "split": "all"}]}, "datasets.0.split"),
        (
            {**ONE, "eval_dataset_name": "/a.jsonl", "eval_dataset_config": "main", "eval_steps": 1},
            "eval_dataset_config",
        ),
        ({**ONE, "eval_dataset_name": "/a.jsonl", "dataset_test_split": "all", "eval_steps": 1}, "dataset_test_split"),
    ],
)
def test_a_configuration_or_a_split_of_a_file_is_refused(raw: dict[str, Any], setting: str) -> None:
    assert f"{setting} is for data sets of the hub, but /a." in str(refused(BASE | raw))


def test_a_number_of_prompts_to_evaluate_on_needs_an_evaluation_set() -> None:
    assert "max_eval_prompts is set, but there is nothing to evaluate on" in str(refused(ONE | {"max_eval_prompts": 8}))
