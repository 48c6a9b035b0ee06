"""A streamed data set: group n is always the same row, whoever asks, and whenever."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.trainer.data.dataset import open_eval_dataset, open_prompts
from services.trainer.data.row_source import BadRowError
from services.trainer.data.row_stream import Block
from services.trainer.data.streamed_dataset import StreamedDataset
from services.trainer.submit_checks.dataset_check import check_dataset
from services.trainer.submit_checks.dataset_verdict import judge_dataset
from shared.errors import UserError
from shared.run_options.data import DatasetSource
from shared.run_options.run_config import RunConfig

NUM_ROWS, BLOCK = 10, 4
EPOCH = [f"question {number}" for number in range(NUM_ROWS)]


def config(path: Path | str = "d.jsonl", **settings: Any) -> RunConfig:
    streamed = {"dataset_streaming": True, "max_steps": 1, "shuffle_buffer_size": BLOCK}
    return RunConfig.model_validate(
        {"model": "m", "dataset_name": str(path), "reward_funcs": ["accuracy_reward"]} | streamed | settings
    )


def rows(count: int = NUM_ROWS) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", "solution": str(number)} for number in range(count)]


def json_lines(directory: Path, count: int = NUM_ROWS) -> Path:
    path = directory / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows(count)))
    return path


class CountedStream:
    """Rows in memory, whose state is the number of rows before; fails a given number of times after ``good`` reads."""

    def __init__(self, content: list[Any], *, failures: int = 0, good: int = 1) -> None:
        self.asked: list[int] = []
        self._content, self._failures, self._good = content, failures, good

    def read_block(self, state: Any, size: int) -> Block:
        first = 0 if state is None else int(state)
        self.asked.append(first)
        if len(self.asked) > self._good and self._failures > 0:
            self._failures -= 1
            raise OSError("no route to host")
        found = self._content[first : first + size]
        return Block(
            found, [f"row {first + n}" for n in range(len(found))], first + size if len(found) == size else None
        )


def streamed(stream: CountedStream, positions: Path | None = None, **settings: Any) -> StreamedDataset:
    waits: list[float] = []
    run = config(**settings)
    return StreamedDataset(stream, DatasetSource(path="d.jsonl"), run, positions=positions, wait=waits.append)


def prompts(dataset: Any, numbers: range) -> list[str]:
    return [dataset.row_at(number).prompt for number in numbers]


def test_every_epoch_has_every_row_once_in_another_order() -> None:
    dataset = streamed(CountedStream(rows()))
    first, second = prompts(dataset, range(NUM_ROWS)), prompts(dataset, range(NUM_ROWS, 2 * NUM_ROWS))
    assert sorted(first) == sorted(second) == sorted(EPOCH)
    assert first not in (second, EPOCH)
    assert sorted(first[:BLOCK]) == EPOCH[:BLOCK], "rows are shuffled within their block"


@pytest.mark.parametrize("count", [8, 9, 1])
def test_an_epoch_may_end_with_a_block_or_within_one(count: int) -> None:
    dataset = streamed(CountedStream(rows(count)), shuffle_dataset=False)
    assert prompts(dataset, range(3 * count)) == 3 * EPOCH[:count]


def test_a_number_means_the_same_row_in_any_order_of_asking() -> None:
    numbers = range(3 * NUM_ROWS)
    expected = prompts(streamed(CountedStream(rows())), numbers)
    dataset = streamed(CountedStream(rows()))
    assert [dataset.row_at(number).prompt for number in reversed(numbers)] == expected[::-1]


def test_the_first_block_is_read_once() -> None:
    stream = CountedStream(rows())
    assert sorted(prompts(streamed(stream), range(BLOCK))) == EPOCH[:BLOCK]
    assert stream.asked == [0]


def test_a_restarted_trainer_goes_on_at_its_block(tmp_path: Path) -> None:
    positions = tmp_path / "positions.json"
    before = streamed(CountedStream(rows(100)), positions)
    expected = prompts(before, range(60))
    stream = CountedStream(rows(100))
    after = streamed(stream, positions)
    assert after.row_at(57).prompt == expected[57]
    assert stream.asked == [0, 56], "the first rows for their columns, and the block of number 57"
    assert prompts(after, range(60)) == expected


@pytest.mark.parametrize(
    "content", ["", "{}", '{"size": 4, "starts": [[0, 0]]}', '{"size": 3, "starts": [[0, 0, null]]}']
)
def test_positions_that_cannot_be_used_only_cost_time(tmp_path: Path, content: str) -> None:
    positions = tmp_path / "positions.json"
    expected = streamed(CountedStream(rows(100))).row_at(57)
    positions.write_text(content)
    assert streamed(CountedStream(rows(100)), positions).row_at(57) == expected
    positions.unlink()
    assert streamed(CountedStream(rows(100)), tmp_path / "nowhere" / "positions.json").row_at(57) == expected


def test_a_block_that_cannot_be_read_is_tried_again() -> None:
    dataset = streamed(CountedStream(rows(), failures=4))
    assert prompts(dataset, range(NUM_ROWS)) == prompts(streamed(CountedStream(rows())), range(NUM_ROWS))
    with pytest.raises(UserError, match=r"d\.jsonl cannot be read from row 4 on: no route to host"):
        streamed(CountedStream(rows(), failures=5)).row_at(BLOCK)


def test_the_first_block_is_tried_again_too() -> None:
    dataset = streamed(CountedStream(rows(), failures=4, good=0))
    assert prompts(dataset, range(NUM_ROWS)) == prompts(streamed(CountedStream(rows())), range(NUM_ROWS))
    with pytest.raises(UserError, match=r"d\.jsonl cannot be read from row 0 on: no route to host"):
        streamed(CountedStream(rows(), failures=5, good=0))


def test_a_data_set_that_lost_its_rows_ends_the_run() -> None:
    content = rows()
    dataset = streamed(CountedStream(content))
    content.clear()
    with pytest.raises(UserError, match="has no rows any more"):
        dataset.row_at(BLOCK)


def test_a_bad_row_has_a_problem_and_a_missing_column_is_null() -> None:
    content = [{"prompt": "a", "level": 3}, {"prompt": "b"}, BadRowError("is not JSON")]
    dataset = streamed(CountedStream(content), shuffle_dataset=False)
    assert dataset.columns == ("level",)
    assert [dataset.row_at(number).columns for number in (0, 1)] == [{"level": 3}, {"level": None}]
    assert dataset.row_at(2).problem == "row 2 is not JSON"


def test_json_lines_are_read_in_parts_with_their_line_numbers(tmp_path: Path) -> None:
    path = json_lines(tmp_path)
    with path.open("a") as file:
        file.write("{broken\n")
    dataset = open_prompts(config(path, shuffle_dataset=False))
    assert prompts(dataset, range(NUM_ROWS)) == EPOCH
    problem = dataset.row_at(NUM_ROWS).problem
    assert problem is not None
    assert problem.startswith(f"{path} line 21 is not JSON")
    assert dataset.row_at(NUM_ROWS + 1).prompt == "question 0"
    assert dataset.row_at(3).columns == {"solution": "3"}


def test_parquet_is_read_from_the_middle_of_a_row_group(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "d.parquet"
    pq.write_table(pa.Table.from_pylist(rows()), path, row_group_size=3)
    assert prompts(open_prompts(config(path, shuffle_dataset=False)), range(2 * NUM_ROWS)) == 2 * EPOCH


def test_a_data_set_of_the_hub_continues_where_a_restart_left_it(tmp_path: Path) -> None:
    """A directory is read by the library that reads the hub, in the same way."""
    pytest.importorskip("datasets")
    directory = tmp_path / "data"
    directory.mkdir()
    json_lines(directory, 30)
    run, positions = config(directory), tmp_path / "positions.json"
    expected = prompts(open_prompts(run, positions=positions), range(45))
    assert sorted(expected[:30]) == sorted(f"question {number}" for number in range(30))
    told = json.loads(positions.read_text())
    assert [first for first, *_ in told["starts"]] == [0, 4, 8, 12, 16, 20, 24, 28, 30, 34, 38, 42]
    again = open_prompts(run, positions=positions)
    assert [again.row_at(number).prompt for number in (44, 29, 3)] == [expected[number] for number in (44, 29, 3)]


def test_the_first_rows_are_checked_at_submit_and_are_not_taken_for_all(tmp_path: Path) -> None:
    run = config(json_lines(tmp_path), max_steps=100)
    checked = judge_dataset(run, check_dataset(run))
    assert (checked.errors, checked.warnings) == ([], [])
    assert "num_rows" not in checked.derived
    assert checked.derived["steps"] == 100


def test_what_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        open_prompts(config(tmp_path / "d.jsonl"))
    (tmp_path / "d.jsonl").touch()
    with pytest.raises(UserError, match="has no rows"):
        open_prompts(config(tmp_path / "d.jsonl"))
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").touch()
    with pytest.raises(UserError, match="was written by save_to_disk and can only be read whole"):
        open_prompts(config(saved))


def test_a_file_to_evaluate_on_is_read_whole(tmp_path: Path) -> None:
    evaluated = tmp_path / "eval.jsonl"
    evaluated.write_text(json.dumps({"prompt": "held out"}) + "\n")
    run = config(json_lines(tmp_path), eval_dataset_name=str(evaluated), eval_steps=1)
    dataset = open_eval_dataset(run)
    assert dataset is not None
    assert [dataset.row_at(0).prompt, len(dataset)] == ["held out", 1]
