"""The rows for trials, and their summary."""

from pathlib import Path

import pytest

from benchmarks.chaos import record, table
from benchmarks.chaos.judge import Verdict
from benchmarks.chaos.record import FaultRecord, TrialRecord

pytestmark = pytest.mark.unit


def trial(seed: int) -> TrialRecord:
    faults = [
        FaultRecord("rank", "kill -9", 0.0, at_s=10.0, recovery_s=4.0 + seed),
        FaultRecord("rank", "kill -9", 0.0, at_s=20.0, recovery_s=9.0, is_one_of_a_pair=True),
        FaultRecord("Redis", "SIGSTOP", 2.0, at_s=20.5, is_one_of_a_pair=True, stood=True),
    ]
    run = Verdict("run-a", "finished", steps=5, admitted=12, trained=10, dropped={"stale": 2}, max_staleness=2)
    return TrialRecord(
        seed, "simulated", "0.1", seconds=1800, faults=faults, runs=[run], stood=["it waits"], loads=[2.0, 7.0 + seed]
    )


def test_a_trial_is_read_as_it_was_written(tmp_path: Path) -> None:
    trial(1).write(tmp_path / "a.json")
    trial(0).write(tmp_path / "b.json")
    assert record.read_all(tmp_path.iterdir()) == [trial(0), trial(1)]


def test_seeds_add_up() -> None:
    shown = table.tables([trial(0), trial(1), trial(3)])
    assert "| faults | 9, of them 6 in pairs |" in shown
    assert "| groups dropped, by reason | 6 stale |" in shown
    assert "| runs that stalled | 3 |" in shown
    assert "| hours | 1.5 |" in shown
    assert "| release | 0.1 |" in shown
    assert "| load average of the machine | 4.5, up to 10.0 |" in shown
    assert "| rank | kill -9 | 6 | 5.0 | 7.0 | 9.0 | 0 |" in shown
    assert "| Redis | SIGSTOP | 3 |  |  |  | 3 |" in shown


def test_a_trial_is_broken_by_a_run_that_stands_a_process_left_behind_and_a_broken_promise() -> None:
    good = Verdict("run-a", "finished")
    assert not TrialRecord(0, "simulated", "0.1", runs=[good]).is_broken
    assert TrialRecord(0, "simulated", "0.1", runs=[good], stood=["it waits"]).is_broken
    assert TrialRecord(0, "simulated", "0.1", runs=[good], orphans=["1234 sleep"]).is_broken
    assert TrialRecord(0, "simulated", "0.1", runs=[good, Verdict("run-b", "failed", broken=["no"])]).is_broken
