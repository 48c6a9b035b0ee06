"""What a script has in memory is in files that the services can read."""

import itertools
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from headrace.grpo.run_inputs import RunInputs
from headrace.grpo.run_of_script import Files
from shared.user_code.function_loading import load_function
from shared.user_code.places import Places

ROWS = [{"prompt": [{"role": "user", "content": f"{n} + 1"}], "answer": n + 1} for n in range(5)]


@pytest.fixture
def inputs(tmp_path: Path) -> RunInputs:
    return RunInputs(tmp_path / "inputs", tmp_path / "functions")


def test_a_dataset_is_a_file_with_its_rows(inputs: RunInputs) -> None:
    path = inputs.dataset(datasets.Dataset.from_list(ROWS), num_rows=None, what="train_dataset")
    assert datasets.Dataset.from_parquet(path).to_list() == ROWS


def test_the_same_data_is_the_same_file(inputs: RunInputs, tmp_path: Path) -> None:
    first, second = (inputs.dataset(ROWS, num_rows=None, what="train_dataset") for _ in range(2))
    assert first == second
    assert [path.name for path in (tmp_path / "inputs").iterdir()] == [Path(first).name]


def test_an_iterable_dataset_gives_the_rows_that_are_needed(inputs: RunInputs) -> None:
    endless = ({"prompt": str(n)} for n in itertools.count())
    path = Path(inputs.dataset(endless, num_rows=3, what="train_dataset"))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"prompt": str(n)} for n in range(3)]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("rows", "train_dataset is a str; give a datasets.Dataset, or an iterable of rows"),
        (3, "train_dataset is a int; give a datasets.Dataset"),
        ([], "train_dataset has no rows"),
        (["prompt", "answer"], "train_dataset has rows of type str, and not dictionaries"),
        (iter(ROWS), "train_dataset has no length: set max_steps"),
        ([{"prompt": object()}], "train_dataset has a value that JSON does not have"),
    ],
)
def test_data_that_cannot_be_written_is_refused(inputs: RunInputs, tmp_path: Path, data: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        inputs.dataset(data, num_rows=None, what="train_dataset")
    assert not list((tmp_path / "inputs").iterdir())


def test_a_list_is_written_whole(inputs: RunInputs) -> None:
    path = Path(inputs.dataset(ROWS, num_rows=2, what="train_dataset"))
    assert len(path.read_text().splitlines()) == len(ROWS)


def test_a_transform_is_not_dropped(inputs: RunInputs) -> None:
    with pytest.raises(ValueError, match="has a transform"):
        inputs.dataset(datasets.Dataset.from_list(ROWS).with_transform(dict), num_rows=None, what="train_dataset")


def test_an_input_is_found_again_only_by_the_same_object(inputs: RunInputs) -> None:
    files = Files(lambda: inputs)
    written = [
        files.once("data", rows, lambda it, rows=rows: it.dataset(rows, num_rows=None, what="data"))  # type: ignore[misc]
        for rows in ([{"prompt": str(number)}] for number in range(50))
    ]
    assert len(set(written)) == 50


def brevity(completions: list[str], **_: Any) -> list[float]:
    return [1 / len(completion) for completion in completions]


def test_a_function_can_be_loaded_where_it_runs(inputs: RunInputs, tmp_path: Path) -> None:
    name = inputs.function(brevity, otherwise="reward_0")
    assert name.endswith(":brevity")
    assert name == inputs.function(brevity, otherwise="reward_0")
    function = load_function(name, places=Places(directories=(str(tmp_path / "functions"),)))
    assert function(["ab"]) == [0.5]
