"""What a script has in memory is in files that the services can read."""

import itertools
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from headrace.api_connection import HeadraceApiError
from headrace.grpo.input_delivery import SharedFiles, Uploads
from headrace.grpo.run_inputs import RunInputs
from headrace.grpo.script import Files
from shared.user_code.function_loading import load_function
from shared.user_code.places import Places

ROWS = [{"prompt": [{"role": "user", "content": f"{n} + 1"}], "answer": n + 1} for n in range(5)]


@pytest.fixture
def inputs(tmp_path: Path) -> RunInputs:
    return RunInputs(tmp_path / "inputs", SharedFiles(tmp_path / "functions"))


def test_a_dataset_is_a_file_with_its_rows(inputs: RunInputs) -> None:
    path = inputs.dataset(datasets.Dataset.from_list(ROWS), num_rows=None, what="train_dataset")
    assert datasets.Dataset.from_parquet(path).to_list() == ROWS


def test_writing_a_dataset_prints_nothing(inputs: RunInputs, capsys: pytest.CaptureFixture[str]) -> None:
    datasets.enable_progress_bars()
    inputs.dataset(datasets.Dataset.from_list(ROWS), num_rows=None, what="train_dataset")
    assert capsys.readouterr().err == ""
    assert not datasets.are_progress_bars_disabled()


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


class Elsewhere:
    """Takes uploads as a deployment does that shares no directory with this machine."""

    def __init__(self, problem: str = "") -> None:
        self.taken: dict[str, bytes] = {}
        self._problem = problem

    def upload(self, path: Path) -> str:
        if self._problem:
            raise HeadraceApiError("no", status=404, problem={"type": self._problem})
        self.taken[path.name] = path.read_bytes() if path.is_file() else b""
        return f"/uploads/{path.name}"

    def upload_module(self, name: str, source: str) -> str:
        if self._problem:
            raise HeadraceApiError("no", status=404, problem={"type": self._problem})
        self.taken[name] = source.encode()
        return f"{name}_there"


def test_data_for_services_elsewhere_is_uploaded_and_not_kept(tmp_path: Path) -> None:
    elsewhere = Elsewhere()
    inputs = RunInputs(tmp_path / "inputs", Uploads(elsewhere))
    where = inputs.dataset(ROWS, num_rows=None, what="train_dataset")
    (name,) = elsewhere.taken
    assert where == f"/uploads/{name}"
    assert [json.loads(line) for line in elsewhere.taken[name].splitlines()] == ROWS
    assert not list((tmp_path / "inputs").iterdir())


def test_a_path_of_this_machine_is_uploaded_and_other_names_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("{}")
    Path("model").mkdir()
    elsewhere = Elsewhere()
    inputs = RunInputs(tmp_path / "inputs", Uploads(elsewhere))
    assert inputs.path("rows.jsonl") == "/uploads/rows.jsonl"
    assert inputs.path("model") == "/uploads/model"
    assert [inputs.path(name) for name in ("gsm8k", "org/name", "/models/there", "")] == [
        "gsm8k", "org/name", "/models/there", "",
    ]  # fmt: skip
    here = RunInputs(tmp_path / "inputs", SharedFiles(tmp_path / "functions"))
    assert here.path("rows.jsonl") == str(tmp_path / "rows.jsonl")


def test_a_deployment_without_uploads_gets_paths_as_they_are_and_refuses_objects(tmp_path: Path) -> None:
    inputs = RunInputs(tmp_path / "inputs", Uploads(Elsewhere("/problems/uploads-off")))
    assert inputs.path(str(tmp_path)) == str(tmp_path)
    with pytest.raises(HeadraceApiError):
        inputs.dataset(ROWS, num_rows=None, what="train_dataset")
    narrow = RunInputs(tmp_path / "inputs", Uploads(Elsewhere("/problems/scope-missing")))
    with pytest.raises(HeadraceApiError):
        narrow.path(str(tmp_path))


def test_a_function_for_services_elsewhere_is_sent_as_source(tmp_path: Path) -> None:
    elsewhere = Elsewhere()
    inputs = RunInputs(tmp_path / "inputs", Uploads(elsewhere))
    assert inputs.function(brevity, otherwise="reward_0") == "brevity_there:brevity"
    assert b"def brevity(" in elsewhere.taken["brevity"]


@pytest.mark.parametrize("problem", ["/problems/code-uploads-off", "/problems/scope-missing"])
def test_a_function_needs_services_that_take_code_or_a_directory_that_both_sides_see(
    tmp_path: Path, problem: str
) -> None:
    inputs = RunInputs(tmp_path / "inputs", Uploads(Elsewhere(problem)))
    with pytest.raises(
        ValueError, match=r"brevity is a function of this script, and the services do not take it: no\. Another"
    ) as refusal:
        inputs.function(brevity, otherwise="reward_0")
    assert "HEADRACE_INPUTS_DIR" in str(refusal.value)
