"""Reads the files that a run left behind and its description from the run API.

    checkpoints/step_*, model     the ledger, weights     rollouts/step_*.jsonl              rollouts of each step
    metrics.jsonl                 each step               evaluations.jsonl, evaluations/    each evaluation
    GET /v1/runs/RUN              status, counts          pushes.jsonl                       each weight push
    sightings                     the run's progress, recorded again and again while it ran

Does not import the services, but reads their files as any other program would.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos import workload
from benchmarks.chaos.weights import weight_problems

Row = dict[str, Any]


@dataclass(frozen=True)
class Sighting:
    """The progress of a run at one moment.

    Attributes:
        step: Step of the newest line of its metrics.
        saved_step: Step of its newest undamaged checkpoint; 0 without one.
    """

    step: int
    saved_step: int


@dataclass(frozen=True)
class RunHistory:
    """Everything that is known about one run.

    Attributes:
        status: Status from the run API.
        ledger: Ledger of the newest checkpoint; None without one.
        ledger_step: Step of the newest checkpoint.
        metrics: Lines of metrics.jsonl.
        rollouts: Lines of the rollout log, by step.
        pushes: Lines of pushes.jsonl.
        evaluations: Lines of evaluations.jsonl.
        evaluation_rollouts: Completions sampled in evaluations, by step.
        prompt_tokens: Tokens of every prompt.
        num_prompts: Rows of the training data set. ``num_eval_prompts`` is the same for the evaluation set.
        progress: Counts from the run API.
        was_stopped: Whether a stop was requested, so that no further evaluation was made.
        weight_problems: Problems of the newest checkpoint and the final model.
        unreadable: Files and line numbers that are not JSON, in files that a crash must not damage.
    """

    run_id: str
    status: str
    reason: str
    groups_per_step: int
    num_generations: int
    max_staleness: int
    eval_steps: int
    prompt_tokens: float
    num_prompts: int
    num_eval_prompts: int
    ledger: Mapping[str, Any] | None
    ledger_step: int
    metrics: Sequence[Row]
    rollouts: Mapping[int, Sequence[Row]]
    pushes: Sequence[Row]
    evaluations: Sequence[Row]
    evaluation_rollouts: Mapping[int, Sequence[Row]]
    progress: Mapping[str, Any]
    was_stopped: bool
    weight_problems: Sequence[str]
    sightings: Sequence[Sighting] = ()
    unreadable: Sequence[str] = ()


def read_history(run: Mapping[str, Any], run_dir: Path, *, sightings: Sequence[Sighting] = ()) -> RunHistory:
    """Return the history of a run.

    Args:
        run: The run's object from the run API.
        run_dir: The run's directory.
        sightings: Sightings in order of time.
    """
    config: Mapping[str, Any] = run["config"]
    newest = newest_checkpoint(run_dir)
    state = None if newest is None else json.loads((newest / "trainer_state.json").read_text("utf-8"))
    unreadable: list[str] = []
    rollouts, evaluation_rollouts = (
        {_number(path): _lines(path, unreadable) for path in sorted((run_dir / folder).glob("step_*.jsonl"))}
        for folder in ("rollouts", "evaluations")
    )
    metrics = _lines(run_dir / "metrics.jsonl", unreadable)
    return RunHistory(
        run_id=str(run["run_id"]),
        status=str(run["status"]),
        reason=str(run["reason"]),
        groups_per_step=int(config["groups_per_step"]),
        num_generations=int(config["num_generations"]),
        max_staleness=int(config["max_staleness"]),
        eval_steps=int(config["eval_steps"]),
        prompt_tokens=_rendered_tokens(metrics, rollouts) if config.get("tools") else workload.PROMPT_TOKENS,
        num_prompts=_num_lines(config["dataset_name"]),
        num_eval_prompts=_num_lines(config["eval_dataset_name"]),
        ledger=None if state is None else state["extra"]["ledger"],
        ledger_step=0 if newest is None else _number(newest),
        metrics=metrics,
        rollouts=rollouts,
        pushes=_lines(run_dir / "pushes.jsonl", []),  # never truncated, so a crash may have left half a line
        evaluations=_lines(run_dir / "evaluations.jsonl", unreadable),
        evaluation_rollouts=evaluation_rollouts,
        progress=run.get("progress", {}),
        was_stopped=run.get("desired") == "stop",
        weight_problems=[] if newest is None else weight_problems(run_dir, newest, _number(newest)),
        sightings=sightings,
        unreadable=unreadable,
    )


def _rendered_tokens(metrics: Sequence[Row], rollouts: Mapping[int, Sequence[Row]]) -> float:
    """Return the tokens of a prompt by the first step, because only the services know how a conversation is rendered.

    All prompts have the same length, so they must have as many in every later step.
    """
    first = rollouts.get(1, ())
    if not metrics or not first:
        return 0.0
    return (float(metrics[0]["num_tokens"]) - sum(int(row["num_tokens"]) for row in first)) / len(first)


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest checkpoint that has its final name."""
    return max((run_dir / "checkpoints").glob("step_*"), default=None)


def saved_step(run_dir: Path, damaged: Collection[str]) -> int:
    """Return the step of the newest checkpoint that is not damaged; 0 without one."""
    whole = [path for path in (run_dir / "checkpoints").glob("step_*") if path.name not in damaged]
    return max(map(_number, whole), default=0)


def numbers(runs: Iterable[Sequence[int]]) -> list[int]:
    """Return the numbers in the ``[first, last]`` ranges of a ledger."""
    return [number for first, last in runs for number in range(first, last + 1)]


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def _num_lines(path: str) -> int:
    return len(Path(path).read_text("utf-8").splitlines())


def _lines(path: Path, unreadable: list[str]) -> list[Row]:
    rows: list[Row] = []
    if not path.exists():
        return rows
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            unreadable.append(f"{path.parent.name}/{path.name}:{number}")
    return rows
