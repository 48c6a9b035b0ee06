"""How `headrace rewards check` treats names, rows and outcomes, without processes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.command_line import main
from headrace.reward_check import report, trial
from headrace.reward_check.function_name import NamedFunction, named_function
from headrace.reward_check.report import training_view
from headrace.reward_check.row_groups import RowGroup, read_row_groups
from headrace.terminal import console
from services.rewarder.reward_answer import Inspected
from shared.errors import UserError
from shared.messages import Outcome, RewardOutcome
from shared.user_code.places import Places

pytestmark = pytest.mark.unit


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_REWARD_PATH", raising=False)
    return tmp_path


def rows(directory: Path, *found: dict[str, Any]) -> dict[str, Any]:
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in found))
    return {"dataset_name": str(file)}


def outcomes(*values: float | Outcome) -> list[RewardOutcome]:
    return [
        RewardOutcome("f", value, None, 1.0) if isinstance(value, str) else RewardOutcome("f", "scored", value, 1.0)
        for value in values
    ]


def test_a_file_is_looked_for_in_its_own_directory(here: Path) -> None:
    (here / "code").mkdir()
    (here / "code" / "mine.py").touch()
    found = named_function("code/mine.py:judge")
    assert found == NamedFunction("mine:judge", Places((str(here / "code"),)), here / "code" / "mine.py")


def test_a_module_is_looked_for_where_headrace_up_would(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert named_function("mine:judge") == NamedFunction("mine:judge", Places((str(here),)))
    monkeypatch.setenv("HEADRACE_REWARD_PATH", "/a:/b")
    monkeypatch.setenv("HEADRACE_REWARD_MODULES", "theirs.rewards")
    places = Places(("/a", "/b", str(here)), ("theirs.rewards",))
    assert named_function("accuracy_reward") == NamedFunction("accuracy_reward", places)


def test_relative_directories_of_reward_modules_begin_here(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_REWARD_PATH", "code")
    assert named_function("mine:judge").places.directories == (str(here / "code"), str(here))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mine.py", "mine.py names no function: write mine.py:FUNCTION"),
        ("no.py:judge", "no.py does not exist"),
        ("dir/mine.txt:judge", "is not a Python file"),
        ("my-own.py:judge", "rename it, for example to my_own.py"),
        ("no.py", "no.py names no function: write no.py:FUNCTION"),
        ("some-org/rm", "some-org/rm names a reward model, but this checks only functions"),
        (
            "imp.py:judge",
            "imp.py is hidden by the standard module imp, which is found first: rename it, for example to",
        ),
        ("pytest.py:judge", "pytest.py is hidden by the module pytest ("),
    ],
)
def test_a_name_that_cannot_be_meant_gets_a_sentence(here: Path, text: str, says: str) -> None:
    (here / "dir").mkdir()
    for name in ("mine.py", "my-own.py", "dir/mine.txt", "imp.py", "pytest.py"):
        (here / name).touch()
    with pytest.raises(UserError) as error:
        named_function(text)
    assert says in str(error.value)


def test_a_file_may_be_importable_already_and_share_its_name_with_a_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "elsewhere" / "theirs").mkdir(parents=True)
    for name in ("mine", "theirs"):
        (here / f"{name}.py").touch()
    monkeypatch.syspath_prepend(here / "elsewhere")
    assert named_function("theirs.py:judge").name == "theirs:judge"
    monkeypatch.syspath_prepend(here)
    assert named_function("mine.py:judge").name == "mine:judge"


def test_a_refused_function_leaves_no_event_loop_behind(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def refuse(*_: object, **__: object) -> None:
        loops.append(asyncio.get_running_loop())
        raise UserError("no such function")

    monkeypatch.setattr(trial, "try_function", refuse)
    file = rows(here, {"prompt": "p", "answer": "1"})["dataset_name"]
    assert main(["rewards", "check", "mine:judge", "--dataset", file]) == 2
    assert [loop.is_closed() for loop in loops] == [True]


WAITS_TO_BE_MISSED = """
import time
from pathlib import Path


def wait_for(file):
    while not Path(__file__).with_name(file).exists():
        time.sleep(0.01)


wait_for("1 said")


def score(completions, **columns):
    wait_for("2 said")
    return [1.0] * len(completions)
"""


def test_a_long_wait_is_reported_while_it_lasts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SAY_AFTER_S", 0.2)
    (here / "waits.py").write_text(WAITS_TO_BE_MISSED)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        (here / f"{len(said)} said").touch()

    groups = read_row_groups(rows(here, {"prompt": "p"}), num_rows=1, completion_column=None).groups
    done = asyncio.run(trial.try_function("waits:score", groups, places=Places((str(here),)), timeout_s=50.0, say=say))
    assert [outcome.outcome for outcome in done.outcomes[0]] == ["scored", "scored"]
    assert said == [
        "waiting for waits:score to be imported, 60 s at most",
        "waiting for waits:score to score 1 row, 50 s at most",
    ]


def test_a_missing_file_of_rows_is_named_whole(here: Path) -> None:
    with pytest.raises(UserError) as error:
        read_row_groups({"dataset_name": "no.jsonl"}, num_rows=1, completion_column=None)
    assert str(error.value) == f"the file {here}/no.jsonl does not exist"


def test_the_gold_column_gives_each_row_its_own_answer_and_another_ones(here: Path) -> None:
    settings = rows(here, *({"prompt": f"{n}+{n}?", "answer": str(2 * n)} for n in range(3)))
    read = read_row_groups(settings, num_rows=8, completion_column=None)
    assert [group.completions for group in read.groups] == [("0", "2"), ("2", "4"), ("4", "0")]
    assert [group.prompt for group in read.groups] == ["0+0?", "1+1?", "2+2?"]
    assert read.groups[1].columns == {"answer": "2"}
    assert "'answer'" in read.completions_are


def test_a_list_of_texts_is_the_group(here: Path) -> None:
    settings = rows(here, {"prompt": "p", "answer": "x", "tries": ["a", "b", "c"]})
    (group,) = read_row_groups(settings, num_rows=8, completion_column="tries").groups
    assert group.completions == ("a", "b", "c")


def test_messages_are_the_text_of_the_last(here: Path) -> None:
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    settings = rows(here, {"prompt": "p", "completion": said}, {"prompt": "p", "completion": None})
    first, second = read_row_groups(settings, num_rows=8, completion_column="completion").groups
    assert first.completions == ("a", "")
    assert second.completions == ("", "a")


def test_without_a_gold_column_an_empty_text_and_the_prompt_are_scored(here: Path) -> None:
    read = read_row_groups(rows(here, {"prompt": "say hello"}), num_rows=8, completion_column=None)
    assert read.groups[0].completions == ("", "say hello")


def test_rows_that_a_run_would_drop_are_left_out_with_a_reason(here: Path) -> None:
    settings = rows(here, {"prompt": "p", "answer": "1"}, {"answer": "2"}, {"prompt": "q", "answer": "3"})
    read = read_row_groups(settings, num_rows=8, completion_column=None)
    assert [group.row for group in read.groups] == [0, 2]
    (problem,) = read.problems
    assert "line 2 has no column 'prompt'" in problem


@pytest.mark.parametrize(
    ("row", "column", "says"),
    [
        ({"question": "q", "answer": "1"}, None, "no row can be used: "),
        ({"prompt": "p", "answer": "1"}, "gold", "the data set has no column 'gold'; its columns are: answer"),
        ({"prompt": "p", "answer": {"a": 1}}, None, "row 0: 'answer' is neither text, nor messages"),
    ],
)
def test_rows_that_cannot_be_scored_are_a_sentence(here: Path, row: dict[str, Any], column: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        read_row_groups(rows(here, row), num_rows=8, completion_column=column)
    assert says in str(error.value)


def test_control_characters_of_a_completion_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    group = RowGroup(0, "p", {}, ("\x1b[31mred", "\ud800"))
    found = (RewardOutcome("f", "scored", 1.0, 1.0, detail="said \x1b]0;title\x07"), *outcomes(0.0))
    done = trial.Trial(Inspected("sync", "", []), (found,), (), is_ended=True)
    console(pipe_width=160).print(report.table([group], done))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"\x1b[31mred" in shown
    assert r"said \x1b]0;title\x07" in shown
    assert r"\ud800" in shown


def test_groups_meet_the_fate_that_they_have_in_training() -> None:
    told_apart = training_view(outcomes(1.0, 0.0))
    assert told_apart.fate == "trained"
    assert told_apart.advantages == pytest.approx((0.5 / 0.7072068, -0.5 / 0.7072068), abs=1e-6)
    assert training_view(outcomes(0.5, 0.5)).fate == "zero_std"
    assert training_view(outcomes(0.5, "timeout")).fate == "unscorable"
    assert training_view(outcomes("not_applicable", "error")).fate == "unscorable"
    part = training_view(outcomes(1.0, "error", 0.0))
    assert part.fate == "trained"
    assert part.rewards == (1.0, None, 0.0)
    assert part.advantages is not None
    assert part.advantages[1] == 0.0, "a failed completion has no advantage"
