"""Parquet files and the hub; JSON Lines are tested in tests/unit, where neither pyarrow nor datasets is needed."""

import datetime
import decimal
from pathlib import Path
from typing import Any, cast

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from services.trainer.data.dataset import open_dataset, open_eval_dataset
from services.trainer.data.dataset_check import check_dataset
from shared.errors import UserError
from shared.run_config import RunConfig


def config(name: str, **settings: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": "m", "dataset_name": name, "reward_funcs": ["accuracy_reward"], "shuffle_dataset": False} | settings
    )


def parquet(path: Path, rows: list[dict[str, Any]]) -> RunConfig:
    pq.write_table(cast(Any, pa.Table).from_pylist(rows), path)
    return config(str(path))


def test_a_parquet_row_keeps_its_types_and_times_become_text(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "answer": 4,
        "share": 0.5,
        "ok": True,
        "note": None,
        "tags": ["a", "b"],
        "more": {"k": [1, 2]},
        "day": datetime.date(2024, 2, 29),
        "at": datetime.datetime(2024, 2, 29, 12, 0, tzinfo=datetime.UTC),
        "price": decimal.Decimal("1.50"),
    }
    row = open_dataset(parquet(tmp_path / "train.parquet", [{"prompt": "2+2"} | values])).row_at(0)
    assert row.problem is None
    assert row.prompt == "2+2"
    assert row.columns == values | {"day": "2024-02-29", "at": "2024-02-29T12:00:00+00:00", "price": "1.50"}


def test_conversations_in_parquet_lose_the_nulls_that_the_columns_added(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "a", "name": "n"}, {"role": "user", "content": "b"}]
    row = open_dataset(parquet(tmp_path / "train.parquet", [{"prompt": messages}])).row_at(0)
    assert row.prompt == messages


def test_a_bad_parquet_row_is_named(tmp_path: Path) -> None:
    (found,) = check_dataset(parquet(tmp_path / "train.parquet", [{"prompt": "a"}, {"prompt": None}])).sources
    assert (found.num_rows, found.num_bad) == (2, 1)
    assert (
        found.first_bad
        == f"{tmp_path / 'train.parquet'} row 1 has null as 'prompt', which must be text or a list of messages"
    )


def test_a_column_of_bytes_is_refused_with_what_to_do(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "image": b"\x00", "answer": 4}]
    (found,) = check_dataset(parquet(tmp_path / "train.parquet", rows)).sources
    assert "'image', which a reward function cannot be sent; leave that column out" in found.first_bad
    left_out = parquet(tmp_path / "train.parquet", rows).model_copy(update={"columns": ["answer"]})
    assert open_dataset(left_out).row_at(0).columns == {"answer": 4}


@pytest.mark.parametrize("content", [b"not parquet at all", b"PAR1" + b"\x00" * 20 + b"PAR1", b""])
def test_a_file_that_is_not_parquet_is_explained(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        open_dataset(config(str(path)))


def test_a_split_of_a_dataset_is_read_like_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(path: str, name: str | None, *, split: str) -> Any:
        asked.append((path, name, split))
        return datasets.Dataset.from_list([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    dataset = open_dataset(config("owner/name", dataset_config="main", dataset_train_split="test"))
    assert asked == [("owner/name", "main", "test")]
    assert (dataset.row_at(3).prompt, dataset.row_at(3).columns) == ("b", {"answer": 2})


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DatasetNotFoundError("no"), "no such file, and no dataset of that name"),
        (ValueError("Unknown split 'tain'. Should be one of ['train']."), "Unknown split 'tain'"),
        (ConnectionError("no route"), "could not be loaded: no route"),
        (DatasetGenerationError("torn"), "could not be loaded: torn"),
    ],
)
def test_whatever_the_hub_says_becomes_a_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def load_dataset(*args: object, **kwargs: object) -> Any:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match="owner/name") as caught:
        open_dataset(config("owner/name"))
    assert said in str(caught.value)
    assert caught.value.field == "dataset_name"


def test_of_a_data_set_of_the_hub_only_the_first_rows_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_args: object, **_kwargs: object) -> Any:
        return datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}, {"prompt": ""}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (found,) = check_dataset(config("owner/name"), max_hub_rows=2).sources
    assert (found.is_file, found.num_rows, found.num_checked, found.num_bad) == (False, 3, 2, 0)


def test_a_data_set_of_the_hub_and_a_file_are_mixed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(path: str, name: str | None, *, split: str) -> Any:
        asked.append((path, name, split))
        return datasets.Dataset.from_list([{"problem": "h0", "solution": "1"}, {"problem": "h1", "solution": "2"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    pq.write_table(cast(Any, pa.Table).from_pylist([{"prompt": "f0", "level": 3}]), tmp_path / "f.parquet")
    mixed = RunConfig.model_validate(
        {
            "model": "m",
            "reward_funcs": ["accuracy_reward"],
            "shuffle_dataset": False,
            "rename_columns": {"problem": "prompt"},
            "datasets": [
                {"path": "owner/name", "name": "main", "split": "all"},
                {"path": str(tmp_path / "f.parquet")},
            ],
        }
    )
    dataset = open_dataset(mixed)
    assert asked == [("owner/name", "main", "all")]
    rows = sorted(
        (str(row.prompt), row.columns["solution"], row.columns["level"]) for row in map(dataset.row_at, range(3))
    )
    assert rows == [("f0", None, 3), ("h0", "1", None), ("h1", "2", None)]


def test_a_split_to_evaluate_on_is_read_from_the_data_set_that_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, name: str | None, *, split: str) -> Any:
        return datasets.Dataset.from_list([{"prompt": f"{path} {name} {split}"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    dataset = open_eval_dataset(config("owner/name", dataset_config="main", dataset_test_split="test", eval_steps=5))
    assert dataset is not None
    assert dataset.row_at(0).prompt == "owner/name main test"


def test_a_directory_that_datasets_understands_is_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    dataset = open_dataset(config(str(tmp_path)))
    assert [dataset.row_at(n).prompt for n in range(2)] == ["a", "b"]
