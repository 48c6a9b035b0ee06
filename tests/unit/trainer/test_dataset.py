import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.trainer.dataset import check_dataset, open_dataset
from shared.errors import UserError
from shared.run_config import RunConfig

Write = Callable[[list[str]], RunConfig]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes lines to a file and returns the config of a run on it."""

    def written(lines: list[str], **settings: Any) -> RunConfig:
        path = tmp_path / "train.jsonl"
        path.write_text("".join(line + "\n" for line in lines))
        return config(path, **settings)

    return written


def config(path: Path, **settings: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": "m", "dataset_name": str(path), "reward_funcs": ["accuracy_reward"], "shuffle_dataset": False}
        | settings
    )


def numbered(count: int) -> list[str]:
    return [json.dumps({"prompt": f"p{i}", "answer": i}) for i in range(count)]


def test_rows_come_in_file_order_without_shuffling_epoch_after_epoch(write: Write) -> None:
    dataset = open_dataset(write(numbered(3)))
    assert len(dataset) == 3
    assert [dataset.row_at(n).prompt for n in range(7)] == ["p0", "p1", "p2", "p0", "p1", "p2", "p0"]


def test_every_column_but_the_prompt_goes_along(write: Write) -> None:
    line = json.dumps({"question": "2+2", "answer": 4, "share": 0.5, "tags": ["a", None], "more": {"ok": True}})
    row = open_dataset(write([line]).model_copy(update={"prompt_column": "question"})).row_at(0)
    assert row.prompt == "2+2"
    assert row.columns == {"answer": 4, "share": 0.5, "tags": ["a", None], "more": {"ok": True}}
    assert row.problem is None


def test_every_epoch_is_another_permutation_and_a_function_of_the_seed_alone(write: Write) -> None:
    shuffled = write(numbered(20)).model_copy(update={"shuffle_dataset": True})
    dataset, again = open_dataset(shuffled), open_dataset(shuffled)
    first = [dataset.row_at(n).position for n in range(20)]
    second = [dataset.row_at(n).position for n in range(20, 40)]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first != list(range(20))
    # Asked for in any order, by another process, the same admission number is the same row.
    assert [again.row_at(n).position for n in reversed(range(40))] == list(reversed(first + second))
    other_seed = open_dataset(shuffled.model_copy(update={"seed": 7}))
    assert [other_seed.row_at(n).position for n in range(20)] != first


def test_a_conversation_is_a_prompt(write: Write) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    assert open_dataset(write([json.dumps({"prompt": messages})])).row_at(0).prompt == messages


def test_blank_lines_are_skipped_and_still_counted_as_lines(write: Write) -> None:
    config = write(["", json.dumps({"prompt": "a"}), "  ", "{"])
    summary = check_dataset(config)
    assert (summary.num_rows, summary.num_bad) == (2, 1)
    assert "train.jsonl line 4" in summary.first_bad


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"prompt": "a"', "is not JSON"),
        ('["a"]', "is not a JSON object"),
        ('{"question": "a"}', "has no column 'prompt'; it has question"),
        ('{"prompt": null}', "has null as 'prompt'"),
        ('{"prompt": ""}', "has an empty 'prompt'"),
        ('{"prompt": "  "}', "has an empty 'prompt'"),
        ('{"prompt": 4}', "has a number as 'prompt'"),
        ('{"prompt": []}', "has an empty 'prompt'"),
        ('{"prompt": ["hi"]}', "has a value of type str as message 1 of 'prompt'"),
        ('{"prompt": [{"role": "user"}]}', "has no 'content' in message 1"),
        ('{"prompt": [{"role": "user", "content": "a"}, {"content": "b"}]}', "has no 'role' in message 2"),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "has a list as 'content' of message 1"),
        ('{"prompt": "a", "n": 18446744073709551616}', "an integer in 'n' that does not fit"),
    ],
)
def test_a_bad_row_names_the_file_the_line_and_what_is_wrong(write: Write, line: str, what: str) -> None:
    config = write([json.dumps({"prompt": "good"}), line, json.dumps({"prompt": "good"})])
    summary = check_dataset(config)
    assert (summary.num_rows, summary.num_bad) == (3, 1)
    assert summary.first_bad.startswith(f"{config.dataset_name} line 2 ")
    assert what in summary.first_bad
    problem = open_dataset(config).row_at(1).problem
    assert problem == summary.first_bad


def test_a_check_of_good_rows_says_what_is_there(write: Write) -> None:
    summary = check_dataset(write(numbered(5)))
    assert (summary.num_rows, summary.columns, summary.num_bad, summary.first_bad) == (5, ("prompt", "answer"), 0, "")


def test_a_check_may_stop_early(write: Write) -> None:
    summary = check_dataset(write([*numbered(2), "{"]), limit=2)
    assert (summary.num_rows, summary.num_bad) == (3, 0)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"there is no file /nowhere/train.jsonl") as caught:
        open_dataset(config(Path("/nowhere/train.jsonl")))
    assert caught.value.field == "dataset_name"


def test_a_relative_path_is_explained_where_it_was_looked_for() -> None:
    with pytest.raises(UserError, match="give an absolute path"):
        open_dataset(config(Path("nowhere.jsonl")))


def test_an_empty_file_is_refused(write: Write) -> None:
    with pytest.raises(UserError, match="has no rows"):
        open_dataset(write([]))


def test_a_file_of_another_kind_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("prompt\nhi\n")
    with pytest.raises(UserError, match=r"neither .jsonl nor .parquet; convert it"):
        open_dataset(config(path))
