import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.trainer.data.dataset import Row, SourceRows, open_dataset, open_eval_dataset
from services.trainer.submit_checks.dataset_check import check_dataset
from services.trainer.submit_checks.dataset_verdict import judge_dataset
from shared.errors import UserError
from shared.run_options.run_config import RunConfig

pytestmark = pytest.mark.unit

Write = Callable[..., RunConfig]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes lines to a file and returns the config of a run on that file."""

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


def test_every_epoch_is_another_permutation_and_depends_only_on_the_seed(write: Write) -> None:
    shuffled = write(numbered(20)).model_copy(update={"shuffle_dataset": True})
    dataset, again = open_dataset(shuffled), open_dataset(shuffled)
    first = [dataset.row_at(n).position for n in range(20)]
    second = [dataset.row_at(n).position for n in range(20, 40)]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first != list(range(20))
    # In any order and in another process, an admission number gives the same row.
    assert [again.row_at(n).position for n in reversed(range(40))] == list(reversed(first + second))
    other_seed = open_dataset(shuffled.model_copy(update={"seed": 7}))
    assert [other_seed.row_at(n).position for n in range(20)] != first


def test_a_conversation_is_a_prompt(write: Write) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    assert open_dataset(write([json.dumps({"prompt": messages})])).row_at(0).prompt == messages


def test_blank_lines_are_skipped_and_still_counted_as_lines(write: Write) -> None:
    config = write(["", json.dumps({"prompt": "a"}), "  ", "{"])
    (found,) = check_dataset(config).sources
    assert (found.num_rows, found.num_bad) == (2, 1)
    assert "train.jsonl line 4" in found.first_bad


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
        (f'{{"prompt": "a", "tree": {"[" * 600}{"]" * 600}}}', "has a column that is nested too deeply"),
    ],
)
def test_a_bad_row_names_the_file_the_line_and_what_is_wrong(write: Write, line: str, what: str) -> None:
    config = write([json.dumps({"prompt": "good"}), line, json.dumps({"prompt": "good"})])
    (found,) = check_dataset(config).sources
    assert (found.num_rows, found.num_bad) == (3, 1)
    assert found.first_bad.startswith(f"{config.dataset_name} line 2 ")
    assert what in found.first_bad
    problem = open_dataset(config).row_at(1).problem
    assert problem == found.first_bad


def test_a_large_file_of_bad_rows_is_refused_after_its_first_rows(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read, read = 0, SourceRows.read

    def count(rows: SourceRows, position: int) -> Row:
        nonlocal num_read
        num_read += 1
        return read(rows, position)

    monkeypatch.setattr(SourceRows, "read", count)
    config = write(['{"question": "2 + 2 ="}'] * 30_000)
    ((field, says),) = judge_dataset(config, check_dataset(config)).errors
    assert field == "dataset_name"
    assert says.startswith("10000 of the first 10000 rows cannot be used; the first: ")
    assert "train.jsonl line 1 has no column 'prompt'; it has question" in says
    assert num_read == 10_000


def test_a_large_file_with_one_good_row_is_read_to_its_end(write: Write) -> None:
    (found,) = check_dataset(write(['{"prompt": "2 + 2 ="}', *["{}"] * 20_000])).sources
    assert (found.num_checked, found.num_bad) == (20_001, 20_000)


def test_a_check_of_good_rows_says_what_is_there(write: Write) -> None:
    summary = check_dataset(write(numbered(5)))
    assert (summary.epoch, summary.columns) == (5, ("prompt", "answer"))
    (found,) = summary.sources
    assert (found.field, found.num_rows, found.num_bad, found.first_bad) == ("dataset_name", 5, 0, "")


def test_a_row_without_a_column_that_others_have_gets_null(write: Write) -> None:
    lines = ['{"prompt": "a", "answer": 1}', '{"prompt": "b", "hint": "h"}']
    dataset = open_dataset(write(lines))
    assert [dataset.row_at(n).columns for n in range(2)] == [{"answer": 1, "hint": None}, {"answer": None, "hint": "h"}]


def test_columns_get_the_names_that_reward_functions_ask_for(write: Write) -> None:
    line = json.dumps({"question": "2+2?", "answer": "#### 4", "id": 7})
    row = open_dataset(write([line], rename_columns={"question": "prompt", "answer": "solution"})).row_at(0)
    assert (row.prompt, row.columns) == ("2+2?", {"solution": "#### 4", "id": 7})


def test_columns_that_are_not_asked_for_stay_behind_and_the_prompt_comes_along_anyway(write: Write) -> None:
    line = json.dumps({"question": "2+2?", "answer": 4, "image": 18446744073709551616})
    row = open_dataset(write([line], rename_columns={"question": "prompt"}, columns=["answer", "hint"])).row_at(0)
    assert (row.problem, row.prompt, row.columns) == (None, "2+2?", {"answer": 4})


def test_two_columns_for_one_name_are_a_bad_row(write: Write) -> None:
    config = write(['{"question": "a", "prompt": "b"}'], rename_columns={"question": "prompt"})
    assert "has two columns for the name 'prompt': question, prompt" in str(open_dataset(config).row_at(0).problem)


SYSTEM, USER = {"role": "system", "content": "Box it."}, {"role": "user", "content": "2+2?"}
OWN = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("prompt", "settings", "expected"),
    [
        ("2+2?", {}, "2+2?"),
        ("2+2?", {"prompt_as_message": True}, [USER]),
        ("2+2?", {"system_prompt": "Box it."}, [SYSTEM, USER]),
        ([USER], {"system_prompt": "Box it."}, [SYSTEM, USER]),
        ([OWN, USER], {"system_prompt": "Box it."}, [OWN, USER]),
        ([USER], {"prompt_as_message": True}, [USER]),
    ],
)
def test_a_prompt_becomes_the_conversation_that_is_asked_for(
    write: Write, prompt: object, settings: dict[str, Any], expected: object
) -> None:
    assert open_dataset(write([json.dumps({"prompt": prompt})], **settings)).row_at(0).prompt == expected


def test_without_an_evaluation_set_there_is_none(write: Write) -> None:
    assert open_eval_dataset(write(numbered(2))) is None


def test_an_evaluation_set_keeps_its_order_and_takes_the_names_of_the_run(write: Write, tmp_path: Path) -> None:
    held_out = tmp_path / "test.jsonl"
    held_out.write_text("".join(json.dumps({"question": f"q{i}", "answer": i}) + "\n" for i in range(20)))
    config = write(
        numbered(3),
        shuffle_dataset=True,
        rename_columns={"question": "prompt"},
        eval_dataset_name=str(held_out),
        eval_steps=5,
    )
    dataset = open_eval_dataset(config)
    assert dataset is not None
    assert [dataset.row_at(n).prompt for n in range(len(dataset))] == [f"q{i}" for i in range(20)]
    assert dataset.row_at(3).columns == {"answer": 3}
    found = check_dataset(config).evaluation
    assert found is not None
    assert (found.field, found.num_rows, found.num_bad) == ("eval_dataset_name", 20, 0)


def test_a_missing_evaluation_set_is_blamed_on_its_own_setting(write: Write) -> None:
    config = write(numbered(3), eval_dataset_name="/nowhere/test.jsonl", eval_on_start=True)
    with pytest.raises(UserError, match=r"there is no file /nowhere/test.jsonl") as caught:
        check_dataset(config)
    assert caught.value.field == "eval_dataset_name"


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
    path = tmp_path / "train.tsv"
    path.write_text("prompt\nhi\n")
    with pytest.raises(UserError, match=r"is none of .jsonl, .json, .csv, .parquet; convert it"):
        open_dataset(config(path))


@pytest.mark.parametrize(
    "text", ['[{"prompt": "a", "n": 1},\n {"prompt": "b"}]', '{"prompt": "a", "n": 1}\n{"prompt": "b"}\n']
)
def test_a_json_file_is_a_list_of_objects_or_json_lines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(text)
    dataset = open_dataset(config(path, shuffle_dataset=False))
    assert [dataset.row_at(number).prompt for number in range(len(dataset))] == ["a", "b"]
    assert [dataset.row_at(number).columns for number in range(2)] == [{"n": 1}, {"n": None}]


def test_a_bad_object_of_a_json_list_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text('[{"prompt": "a"}, 7]')
    dataset = open_dataset(config(path, shuffle_dataset=False))
    assert dataset.row_at(1).problem == f"{path} object 2 is not a JSON object; write one {{...}} a line"


def test_a_json_list_that_breaks_off_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text('[{"prompt": "a"},')
    with pytest.raises(UserError, match="cannot be read as a JSON list"):
        open_dataset(config(path))


GAMES = {"environment_factory": {"go": "my:Go", "chess": "my:Chess"}}


def test_a_row_names_one_of_several_environments_and_may_lack_a_prompt(write: Write) -> None:
    config = write([json.dumps({"environment": "chess", "level": 2})], columns=["level"], **GAMES)
    row = open_dataset(config).row_at(0)
    assert row.problem is None
    assert row.prompt == [{"role": "user", "content": ""}]
    assert row.columns == {"environment": "chess", "level": 2}


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (
            {"environment": "draughts"},
            "has environment 'draughts', which is not among the environments of the run: go, chess",
        ),
        ({"environment": None}, "names no environment in the column 'environment'; environment_factory has go, chess"),
        ({}, "names no environment in the column 'environment'; environment_factory has go, chess"),
    ],
)
def test_a_row_that_names_no_known_environment_is_found_before_the_run(
    write: Write, named: dict[str, Any], says: str
) -> None:
    good = json.dumps({"prompt": "p", "environment": "go"})
    config = write([good, json.dumps({"prompt": "p"} | named)], **GAMES)
    (found,) = check_dataset(config).sources
    assert found.num_bad == 1
    assert found.first_bad.endswith(f"line 2 {says}")
    assert "line 2" in (open_dataset(config).row_at(1).problem or "")


def test_only_the_usual_prompt_column_may_be_missing_and_only_with_an_environment(write: Write) -> None:
    lines = [json.dumps({"answer": 4})]
    assert "has no column 'prompt'" in check_dataset(write(lines)).sources[0].first_bad
    other = write(lines, environment_factory="my:Go", prompt_column="question")
    assert "has no column 'question'" in check_dataset(other).sources[0].first_bad
    assert check_dataset(write(lines, environment_factory="my:Go")).sources[0].num_bad == 0
