"""A few faults of benchmarks/chaos in a whole `headrace up`. `make chaos` causes any number of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# The faults that no other test in this folder causes. The seed has each of them once, in four strikes, the last of
# which is a pair. A fault whose victim is away at that moment is replaced by another one.
FAULTS = ("disk: disk full", "Redis: cut AOF", "everything: power cut", "launcher: kill -9", "fork server: kill -9")
SEED = 10


def strike(results: Path, *arguments: str) -> record.TrialRecord:
    """Run a trial, and return its record."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.chaos",
            *arguments,
            "--minutes",
            "12",
            "--stand-s",
            "300",
            "--results",
            str(results),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (trial,) = record.read_all(results.glob("*.json"))
    return trial


def test_random_faults_over_the_whole_stack_break_no_promise(tmp_path: Path) -> None:
    only = [word for fault in FAULTS for word in ("--only", fault)]
    trial = strike(tmp_path, *only, "--seed", str(SEED), "--faults", str(len(FAULTS)))
    assert len(trial.faults) >= len(FAULTS)
    caused = {f"{fault.victim}: {fault.kind}" for fault in trial.faults}
    assert caused >= {"everything: power cut", "launcher: kill -9"}, "their victims are never away for long"
    assert all(fault.recovery_s is not None for fault in trial.faults)
    assert [run.status for run in trial.runs][-1] == "stopped"
    assert sum(run.trained for run in trial.runs) > 0


@pytest.mark.long
def test_kills_while_tools_are_called_lose_nothing_and_sample_no_recorded_turn_again(tmp_path: Path) -> None:
    trial = strike(tmp_path, "--tools", "--only", "kill -9", "--seed", "1", "--faults", "8")
    assert sum(run.tool_calls for run in trial.runs) > 0
    assert sum(run.turns_recorded for run in trial.runs) > 0
    assert sum(run.turns_sampled_twice for run in trial.runs) == 0
