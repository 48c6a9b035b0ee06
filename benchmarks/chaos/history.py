"""Reads what a run left behind: its directory, and what the run API said of it.

    checkpoints/step_*/trainer_state.json   the ledger       rollouts/step_*.jsonl   what each step trained
    metrics.jsonl                           each step        pushes.jsonl            each weight push
    GET /v1/runs/RUN, .../dead_letters      its end          sightings               where it stood, again and again

Nothing of the services is imported: what they wrote is read as anybody would read it.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Sighting:
    """Where a run stood when the harness looked.

    Attributes:
        step: Of the newest line of its metrics.
        saved_step: Of its newest checkpoint that nobody has damaged; 0 without one.
    """

    step: int
    saved_step: int


@dataclass(frozen=True)
class RunHistory:
    """One run.

    Attributes:
        status: Of the run API.
        ledger: Of the newest checkpoint; None without one.
        ledger_step: Its step.
        metrics: Lines of metrics.jsonl.
        rollouts: Lines of the rollout log, by step.
        pushes: Lines of pushes.jsonl.
        unreadable: Files, with the line, that are no JSON though nothing may be torn there.
    """

    run_id: str
    status: str
    reason: str
    groups_per_step: int
    max_staleness: int
    ledger: Mapping[str, Any] | None
    ledger_step: int
    metrics: Sequence[Row]
    rollouts: Mapping[int, Sequence[Row]]
    pushes: Sequence[Row]
    sightings: Sequence[Sighting] = ()
    num_dead_letters: int = 0
    unreadable: Sequence[str] = field(default=())


def read_history(
    run: Mapping[str, Any], run_dir: Path, *, sightings: Sequence[Sighting] = (), num_dead_letters: int = 0
) -> RunHistory:
    """Return what is known of a run.

    Args:
        run: The run API's object.
        run_dir: Its directory.
        sightings: In the order of time.
        num_dead_letters: Of the run API.
    """
    config: Mapping[str, Any] = run["config"]
    newest = newest_checkpoint(run_dir)
    state = None if newest is None else json.loads((newest / "trainer_state.json").read_text("utf-8"))
    unreadable: list[str] = []
    rollouts = {_number(path): _lines(path, unreadable) for path in sorted((run_dir / "rollouts").glob("step_*.jsonl"))}
    return RunHistory(
        run_id=str(run["run_id"]),
        status=str(run["status"]),
        reason=str(run["reason"]),
        groups_per_step=int(config["groups_per_step"]),
        max_staleness=int(config["max_staleness"]),
        ledger=None if state is None else state["extra"]["ledger"],
        ledger_step=0 if newest is None else _number(newest),
        metrics=_lines(run_dir / "metrics.jsonl", unreadable),
        rollouts=rollouts,
        pushes=_lines(run_dir / "pushes.jsonl", []),  # never cut back, so a crash may have torn a line
        sightings=sightings,
        num_dead_letters=num_dead_letters,
        unreadable=unreadable,
    )


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest checkpoint that has a name."""
    return max((run_dir / "checkpoints").glob("step_*"), default=None)


def saved_step(run_dir: Path, damaged: Collection[str]) -> int:
    """Return the step of the newest checkpoint that is not one of the damaged ones; 0 without one."""
    whole = [path for path in (run_dir / "checkpoints").glob("step_*") if path.name not in damaged]
    return max(map(_number, whole), default=0)


def numbers(runs: Iterable[Sequence[int]]) -> list[int]:
    """Return the numbers in the ledger's ``[first, last]`` runs."""
    return [number for first, last in runs for number in range(first, last + 1)]


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


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
