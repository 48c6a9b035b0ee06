"""CSV files: the types of columns, numbers and dates that stay text, and sentences about files that cannot be read."""

from pathlib import Path
from typing import Any

import pytest

from services.trainer.data.dataset import open_dataset
from services.trainer.submit_checks.dataset_check import check_dataset
from shared.errors import UserError
from shared.run_options.run_config import RunConfig


def config(name: str) -> RunConfig:
    run: dict[str, Any] = {"model": "m", "dataset_name": name, "reward_funcs": ["accuracy_reward"]}
    return RunConfig.model_validate(run | {"shuffle_dataset": False})


def test_a_csv_file_is_a_table_with_the_types_that_datasets_finds_in_it(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text('prompt,answer,score\n"two\nlines, and a comma",4,0.5\nb,,1\n')
    dataset = open_dataset(config(str(path)))
    rows = [dataset.row_at(number) for number in range(len(dataset))]
    assert [row.prompt for row in rows] == ["two\nlines, and a comma", "b"]
    assert [row.columns for row in rows] == [{"answer": 4, "score": 0.5}, {"answer": None, "score": 1.0}]


def test_numbers_in_a_csv_file_that_would_change_stay_texts(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("prompt,answer,code,n,id\na,717897987691852588770249,0xFF,3,9223372036854775807\nb,4,0x1F,0.5,\n")
    dataset = open_dataset(config(str(path)))
    assert [dataset.row_at(number).columns for number in range(2)] == [
        {"answer": "717897987691852588770249", "code": "0xFF", "n": 3.0, "id": 2**63 - 1},
        {"answer": "4", "code": "0x1F", "n": 0.5, "id": None},
    ]


def test_times_and_dates_in_a_csv_file_stay_texts_and_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("prompt,answer,day\na,12:30,2020-01-01\n")
    assert open_dataset(config(str(path))).row_at(0).columns == {"answer": "12:30", "day": "2020-01-01"}
    path.write_bytes("prompt,answer\ncafé,1\n".encode("latin-1"))
    with pytest.raises(UserError, match="invalid UTF8 data; save it as UTF-8"):
        open_dataset(config(str(path)))


def test_a_csv_file_with_rows_of_different_length_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("prompt,answer\na,1\nb,2,3\n")
    with pytest.raises(UserError, match=r"cannot be read as CSV: .*Row #3: Expected 2 columns, got 3"):
        open_dataset(config(str(path)))


def test_a_csv_file_with_another_separator_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("prompt;answer\na;1\n")
    (found,) = check_dataset(config(str(path))).sources
    assert "the separator seems to be ';'; separate the columns with commas" in found.first_bad
