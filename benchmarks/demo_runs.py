"""Runs the demo task with different settings, one run after the other, and stores each result.

    settings of a run --> `headrace demo --set ...` (real services, its own process) --> DIRECTORY/LABEL/result.json

All runs of a seed start with the model that the first run has warmed up. A stored result is not measured again, so a
benchmark of many runs can be interrupted and continued.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TIMEOUT_S = 1800
_SMOOTH = 20


@dataclass(frozen=True)
class DemoRun:
    """One run: its label in tables and as a directory name, and the settings that it changes."""

    label: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class DemoResult:
    """The result of one run."""

    label: str
    settings: dict[str, Any]
    outcome: dict[str, Any]
    """The last line that the demo printed."""
    rewards: list[float]
    """Mean reward of each step."""
    failure: str = ""
    """Why the run has no outcome; empty if it has one."""


def add_arguments(parser: argparse.ArgumentParser, *, directory: str) -> None:
    """Add the arguments that all benchmarks of demo runs share."""
    parser.add_argument("--seed", type=int, default=0, help="seed of every run (0)")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run (the demo's)")
    parser.add_argument("--directory", type=Path, default=Path(directory), help=f"where results are kept ({directory})")


def run_all(runs: Sequence[DemoRun], arguments: argparse.Namespace) -> list[DemoResult]:
    """Make the runs that have no stored result, print progress, and return all results."""
    results: list[DemoResult] = []
    for number, run in enumerate(runs, start=1):
        head = f"[{number}/{len(runs)}] {run.label}"
        settings = dict(run.settings) | ({"max_steps": arguments.steps} if arguments.steps else {})
        directory = arguments.directory.absolute() / f"seed-{arguments.seed}" / run.label
        found = _kept(directory, settings)
        if found is None:
            sys.stderr.write(f"{head}: running; its output goes to {directory / 'demo.log'}\n")
            found = _run(run.label, settings, directory, seed=arguments.seed)
        sys.stderr.write(f"{head}: {_summary(found)}\n")
        sys.stderr.flush()
        results.append(found)
    return results


def steps_to(result: DemoResult, reward: float) -> int | None:
    """Return the first step at which the mean reward of the last 20 steps reached ``reward``, or None."""
    for step in range(_SMOOTH, len(result.rewards) + 1):
        if sum(result.rewards[step - _SMOOTH : step]) / _SMOOTH >= reward:
            return step
    return None


def _run(label: str, settings: dict[str, Any], directory: Path, *, seed: int) -> DemoResult:
    directory.mkdir(parents=True, exist_ok=True)
    state_dir = directory / f"state-{time.strftime('%Y%m%d-%H%M%S')}"
    overrides = [text for name, value in settings.items() for text in ("--set", f"{name}={json.dumps(value)}")]
    command = [sys.executable, "-m", "headrace", "demo", "--seed", str(seed), "--state-dir", str(state_dir), *overrides]
    warmed_up = directory.parent / "model"
    if warmed_up.is_dir():
        command += ["--model", str(warmed_up)]
    with (directory / "demo.log").open("w", encoding="utf-8") as output:
        try:
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=_TIMEOUT_S, check=False)
            failure = ""
        except subprocess.TimeoutExpired:
            failure = f"it took longer than {_TIMEOUT_S} s"
    lines = (directory / "demo.log").read_text(encoding="utf-8").splitlines()
    try:
        outcome: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return DemoResult(label, settings, {}, [], failure or (lines[-1] if lines else "it printed nothing"))
    if not warmed_up.is_dir():
        shutil.copytree(state_dir / "demo" / "model", warmed_up)
    metrics = next(state_dir.glob("runs/*/metrics.jsonl"))
    rewards = [json.loads(line).get("reward") for line in metrics.read_text(encoding="utf-8").splitlines()]
    result = DemoResult(label, settings, outcome, [reward for reward in rewards if reward is not None])
    kept = {"settings": settings, "outcome": outcome, "rewards": result.rewards}
    aside = directory / "result.tmp"
    aside.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    os.replace(aside, directory / "result.json")
    return result


def _kept(directory: Path, settings: dict[str, Any]) -> DemoResult | None:
    path = directory / "result.json"
    if not path.is_file():
        return None
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["settings"] != settings:
        return None
    return DemoResult(directory.name, settings, kept["outcome"], kept["rewards"])


def _summary(result: DemoResult) -> str:
    if not result.outcome:
        return f"failed: {result.failure}"
    outcome = result.outcome
    return (
        f"accuracy {outcome['accuracy_before']:.3f} -> {outcome['accuracy_after']:.3f} "
        f"in {outcome['run_seconds']:.0f} s, staleness mean {outcome['staleness_mean']:.2f}, "
        f"max {outcome['staleness_max']:.0f}"
    )
