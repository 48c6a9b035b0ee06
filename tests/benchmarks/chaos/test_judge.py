"""The judge, on histories that are made by hand: a good one, and each way to break it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.chaos.history import Sighting, read_history
from benchmarks.chaos.judge import Verdict, judge
from tests.benchmarks.chaos.left_files import EPOCH_1, EPOCH_2, Files, rollout

pytestmark = pytest.mark.unit


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_a_run_that_kept_its_promises_is_found_to_have_kept_them(files: Files) -> None:
    verdict = files.verdict()
    assert verdict == Verdict(
        "run-a", "finished", steps=3, admitted=7, trained=6, dropped={"stale": 1}, max_staleness=1
    )


def train(files: Files, step: int, numbers: list[int]) -> None:
    spans = files.rollouts[step][0]["policy_versions"]
    files.rollouts[step] = [
        rollout(number, branch, spans, staleness=step > 1) for number in numbers for branch in (0, 1)
    ]


def span(files: Files, step: int, spans: list[list[int]]) -> None:
    for row in files.rollouts[step]:
        row["policy_versions"] = spans


def lose_a_group(files: Files) -> None:
    files.ledger["dropped"] = {}


def train_a_group_in_two_steps(files: Files) -> None:
    train(files, 3, [5, 1])
    files.ledger |= {"trained": [[0, 2], [4, 5]], "dropped": {"stale": [[3, 3], [6, 6]]}}


def train_and_drop_a_group(files: Files) -> None:
    files.ledger["dropped"]["unscorable"] = [[5, 5]]


def settle_a_group_that_was_never_admitted(files: Files) -> None:
    files.ledger["dropped"]["dead_letter"] = [[900, 900]]


def train_beyond_the_staleness_bound(files: Files) -> None:
    span(files, 3, [[0, 0, 8, 1]])


def log_staleness_beyond_the_bound(files: Files) -> None:
    files.metrics[1]["staleness/max"] = 2


def let_a_version_fall_within_a_completion(files: Files) -> None:
    span(files, 3, [[2, 0, 4, 1], [1, 4, 8, 1]])


def push_an_older_version(files: Files) -> None:
    files.pushes += [(EPOCH_2, 2)]


def push_from_an_incarnation_that_was_replaced(files: Files) -> None:
    files.pushes += [(EPOCH_1 + 5, 4)]


def leave_out_the_metrics_of_a_step(files: Files) -> None:
    del files.metrics[1]


def repeat_the_metrics_of_a_step(files: Files) -> None:
    files.metrics.insert(1, files.metrics[0])


def leave_out_the_rollouts_of_a_step(files: Files) -> None:
    del files.rollouts[2]


def train_a_group_that_the_ledger_does_not_hold(files: Files) -> None:
    files.ledger |= {"trained": [[0, 2], [4, 5]], "dropped": {"stale": [[3, 3], [6, 6]]}}


def train_half_a_step(files: Files) -> None:
    train(files, 3, [5])
    files.ledger |= {"trained": [[0, 2], [4, 5]], "dropped": {"stale": [[3, 3], [6, 6]]}}


def fall_below_a_checkpoint(files: Files) -> None:
    files.sightings += [Sighting(2, 3)]


def fail(files: Files) -> None:
    files.run |= {"status": "failed", "reason": "no room"}


@pytest.mark.parametrize(
    ("breach", "sentence"),
    [
        (lose_a_group, "1 groups lost: 3"),
        (train_a_group_in_two_steps, "1 groups trained or settled twice: 1"),
        (train_and_drop_a_group, "1 groups trained or settled twice: 5"),
        (settle_a_group_that_was_never_admitted, "groups were settled that were never admitted: 900"),
        (train_beyond_the_staleness_bound, "staleness 2 was trained, above 1"),
        (log_staleness_beyond_the_bound, "staleness 2 was trained, above 1"),
        (let_a_version_fall_within_a_completion, "step 3, group 00000005: policy versions fall: [(1, 2), (1, 1)]"),
        (push_an_older_version, "a push of version 2 by incarnation 2 came after 3 by 2"),
        (push_from_an_incarnation_that_was_replaced, "a push of version 4 by incarnation 1 came after 3 by 2"),
        (leave_out_the_metrics_of_a_step, "metrics of 3 steps: steps 2 are missing"),
        (repeat_the_metrics_of_a_step, "metrics of 3 steps: they are out of order or repeated"),
        (leave_out_the_rollouts_of_a_step, "no rollouts of steps 2"),
        (train_a_group_that_the_ledger_does_not_hold, "steps trained groups that the ledger does not hold: 6"),
        (train_half_a_step, "steps 3 did not train 2 groups"),
        (fall_below_a_checkpoint, "the run fell from step 3 to 2, below its checkpoint 3"),
        (fail, "the run failed: no room"),
    ],
)
def test_a_broken_promise_is_found(files: Files, breach: Callable[[Files], None], sentence: str) -> None:
    breach(files)
    assert sentence in files.verdict().broken


def test_a_torn_line_of_metrics_is_found(files: Files) -> None:
    files.verdict()
    with (files.run_dir / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "stal')
    assert judge(read_history(files.run, files.run_dir)).broken == [f"{files.run_dir.name}/metrics.jsonl:4 is not JSON"]


def test_a_run_without_a_checkpoint_is_found(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.verdict()
    shutil.rmtree(tmp_path / "checkpoints")
    assert judge(read_history(files.run, tmp_path)).broken == ["the run has no checkpoint, and so no ledger"]


def test_groups_under_way_in_a_run_that_stands_are_not_lost(files: Files) -> None:
    files.run["status"] = "running"
    files.ledger["admitted"] = 9
    verdict = files.verdict(has_ended=False)
    assert (verdict.lost, verdict.broken) == ([], [])


def test_steps_after_the_newest_checkpoint_are_not_a_fault_of_a_standing_run(files: Files) -> None:
    files.rollouts[4] = [rollout(7, branch, [[3, 0, 8, 2]], staleness=False) for branch in (0, 1)]
    files.metrics.append({"step": 4, "staleness/max": 0})
    assert files.verdict(has_ended=False).broken == []
