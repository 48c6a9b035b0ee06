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

from services.trainer.dataset import check_dataset, open_dataset
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
    summary = check_dataset(parquet(tmp_path / "train.parquet", [{"prompt": "a"}, {"prompt": None}]))
    assert (summary.num_rows, summary.num_bad) == (2, 1)
    assert (
        summary.first_bad
        == f"{tmp_path / 'train.parquet'} row 1 has null as 'prompt', which must be text or a list of messages"
    )


def test_a_column_of_bytes_is_refused_with_what_to_do(tmp_path: Path) -> None:
    summary = check_dataset(parquet(tmp_path / "train.parquet", [{"prompt": "a", "image": b"\x00"}]))
    assert "'image', which a reward function cannot be sent; remove that column" in summary.first_bad


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


def test_a_directory_that_datasets_understands_is_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    dataset = open_dataset(config(str(tmp_path)))
    assert [dataset.row_at(n).prompt for n in range(2)] == ["a", "b"]
