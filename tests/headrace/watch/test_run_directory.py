"""Runs that are read from their files, while no service runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.watch.run_directory import ON_DISK, RunDirectory, directories_in
from headrace.watch.run_watch import RunWatch
from headrace.watch.watch import take_all
from shared.errors import UserError
from tests.closed_directory import close_directory

pytestmark = pytest.mark.unit


def lines(*rows: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the directory of a run of two steps, which evaluated once."""
    found = tmp_path / "run-a"
    (found / "rollouts").mkdir(parents=True)
    (found / "config.json").write_text('{"name": "first", "max_steps": 4}')
    groups = {"groups/admitted": 9.0, "groups/trained": 4.0, "groups/dropped": 2.0, "groups/dropped/stale": 2.0}
    (found / "metrics.jsonl").write_text(
        lines({"step": 1.0, "reward": 0.25}, {"step": 2.0, "reward": 0.5, "push/count": 3.0, **groups})
    )
    (found / "evaluations.jsonl").write_text(lines({"step": 1.0, "eval_reward": 0.75, "eval_skipped": 1.0}))
    (found / "pushes.jsonl").write_text(lines({"members": ["g0"]}, {"members": ["g0", "g1"]}))
    for step in (1, 2):
        (found / "rollouts" / f"step_{step:08d}.jsonl").write_text(lines({"step": step, "completion": "7"}))
    return found


def test_a_directory_gives_what_its_files_say_and_neither_an_end_nor_a_reason_to_wait(run_dir: Path) -> None:
    directory = RunDirectory(run_dir)
    watch = RunWatch(directory.get("run-a"))
    take_all(watch, directory)
    assert (watch.run_id, watch.run["name"], watch.status, watch.run["run_dir"]) == (
        "run-a", "first", ON_DISK, str(run_dir),
    )  # fmt: skip
    assert (watch.step, watch.max_steps, watch.num_in_flight, watch.dropped) == (2, 4, 3, {"stale": 2})
    assert (watch.count("pushes"), watch.count("num_generators")) == (3, 2)
    assert (watch.series("reward"), watch.points("eval_reward")) == ([0.25, 0.5], [(1, 0.75)])
    assert [warning["kind"] for warning in watch.warnings] == ["evaluation_skipped"]
    assert (watch.has_ended, watch.seconds_left(), watch.waiting_for) == (True, None, "")


def test_a_run_that_began_from_another_shows_it_and_the_steps_that_are_its_own(run_dir: Path) -> None:
    (run_dir / "beginning.json").write_text(
        '{"source": "checkpoint", "directory": "/runs/run-b/checkpoints/step_00000001", "said": "run-b:1", '
        '"run_id": "run-b", "step": 1, "steps_before": 1}'
    )
    run = RunDirectory(run_dir).get("run-a")
    assert run["beginning"]["says"] == "step 1 of run-b"
    assert run["progress"]["max_steps"] == 3


def test_the_best_checkpoint_is_found_in_the_evaluations(run_dir: Path) -> None:
    assert RunWatch(RunDirectory(run_dir).get("run-a")).best == ""
    config = {
        "model": "m",
        "dataset_name": "d",
        "reward_funcs": ["f:g"],
        "eval_dataset_name": "e",
        "eval_steps": 1,
        "metric_for_best_model": "reward",
    }
    (run_dir / "config.json").write_text(json.dumps(config))
    assert RunWatch(RunDirectory(run_dir).get("run-a")).best == "step 1, eval_reward 0.75"


def test_rollouts_are_of_the_newest_step_unless_one_is_named(run_dir: Path) -> None:
    directory = RunDirectory(run_dir)
    assert [row["step"] for row in directory.rollouts("run-a")] == [2]
    assert [row["step"] for row in directory.rollouts("run-a", step=1)] == [1]
    with pytest.raises(UserError, match="has no rollouts of step 3: there are rollouts of 2 steps, 1 to 2"):
        directory.rollouts("run-a", step=3)


def test_a_run_that_has_not_trained_yet_has_nothing_to_show(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    directory = RunDirectory(tmp_path)
    watch = RunWatch(directory.get("x"))
    take_all(watch, directory)
    assert (watch.step, watch.by_step, directory.rollouts("x")) == (0, {}, [])


def test_any_other_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not the directory of a run: .*config.json cannot be read \(No such file"):
        RunDirectory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not the directory of a run"):
        RunDirectory(tmp_path)


def test_the_directories_of_runs_are_found_and_others_passed_over(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir.parent / "notes").mkdir()
    assert [directory.run_id for directory in directories_in(run_dir.parent)] == ["run-a"]
    closed = run_dir.parent / "run-of-another-user"
    closed.mkdir()
    close_directory(monkeypatch, closed)
    assert [directory.run_id for directory in directories_in(run_dir.parent)] == ["run-a"]
    with pytest.raises(UserError, match="cannot be read: No such file"):
        directories_in(run_dir.parent / "none")
