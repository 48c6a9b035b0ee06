"""The demo's result: numbers from the run's record and metrics, and whether they are good enough.

    run record, metrics.jsonl, rollout log, two accuracies --> Outcome --> problems(), the last line of JSON

Trained groups are counted in the rollout log, which is written independently of the ledger behind the record's counts.
An admitted group that is neither in the rollout log nor counted as dropped is lost.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

MAX_ACCURACY_BEFORE, MIN_ACCURACY_AFTER = 0.5, 0.9


@dataclass(frozen=True)
class Outcome:
    """The demo's result. Its fields are printed in this order, as JSON, in the last line of output."""

    seed: int
    status: str
    accuracy_before: float
    accuracy_after: float
    seconds: float
    warmup_seconds: float
    run_seconds: float
    steps: int
    batches: int
    takes_turns: bool
    """Whether max_staleness is too small for generation to go on while a batch is trained."""
    staleness_mean: float
    staleness_max: float
    pushes: int
    pushes_confirmed: int
    groups_admitted: int
    groups_trained: int
    groups_dropped: int
    groups_lost: int
    groups_left_over: int
    groups_trained_twice: int
    generated_tokens_per_s: float
    tool_calls: int
    tool_failures: int
    turns_mean: float
    """Assistant messages for each rollout."""
    drift_tokens: int
    """Sampled tokens in rows after the first of a rollout, which a rewritten history begins."""

    def to_json(self) -> str:
        """Return one line of JSON, with floats rounded to four decimals."""
        return json.dumps(
            {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}
        )

    def problems(self) -> list[str]:
        """Return a sentence for each criterion of a successful demo that was not met; empty after success."""
        found: list[str] = []
        if self.status != "finished":
            found.append(f"the run {self.status} instead of finishing")
        if self.accuracy_before > MAX_ACCURACY_BEFORE:
            found.append(
                f"the warmed-up model was already right {self.accuracy_before:.0%} of the time: "
                f"more than {MAX_ACCURACY_BEFORE:.0%} leaves GRPO too little to show"
            )
        if self.accuracy_after < MIN_ACCURACY_AFTER:
            found.append(
                f"the model did not improve enough: right {self.accuracy_after:.1%} of the time, "
                f"but {MIN_ACCURACY_AFTER:.0%} is required"
            )
        if not self.pushes or self.pushes_confirmed != self.pushes:
            found.append(f"only {self.pushes_confirmed} of {self.pushes} weight pushes were confirmed by the generator")
        elif self.pushes_confirmed <= self.batches:
            found.append(f"{self.pushes_confirmed} confirmed pushes are too few for {self.batches + 1} policy versions")
        if self.groups_left_over:
            found.append(f"{self.groups_left_over} prompt groups were still in flight when the run finished")
        if self.groups_lost:
            found.append(f"{self.groups_lost} of {self.groups_admitted} prompt groups were lost")
        if self.groups_trained_twice:
            found.append(f"{self.groups_trained_twice} prompt groups were trained twice")
        if self.staleness_max <= 0 and not self.takes_turns:
            found.append("no group was ever stale: generation and training took turns instead of overlapping")
        return found


@dataclass(frozen=True)
class Trained:
    """Counts from a run's rollout log. ``groups`` has a group's id once for each step that trained the group."""

    groups: list[str]
    tool_calls: int = 0
    tool_failures: int = 0
    turns_mean: float = 1.0
    drift_tokens: int = 0


def read_trained(run_dir: Path) -> Trained:
    """Count prompt groups, tool calls and turns in the rollout log of a run, ``rollouts/step_*.jsonl``."""
    groups: list[str] = []
    rollouts: list[dict[str, Any]] = []
    for path in sorted((run_dir / "rollouts").glob("step_*.jsonl")):
        of_step = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        groups += sorted({str(rollout["group_id"]) for rollout in of_step})
        rollouts += of_step
    return Trained(
        groups=groups,
        tool_calls=sum(rollout.get("tool_calls", 0) for rollout in rollouts),
        tool_failures=sum(rollout.get("tool_failures", 0) for rollout in rollouts),
        turns_mean=sum(map(_num_turns, rollouts)) / max(len(rollouts), 1),
        drift_tokens=sum(row["num_tokens"] for rollout in rollouts for row in rollout.get("rows", [])[1:]),
    )


def _num_turns(rollout: Mapping[str, Any]) -> int:
    if not isinstance(rollout.get("completion"), list):
        return 1
    messages: list[dict[str, Any]] = rollout["completion"]
    return sum(message["role"] == "assistant" for message in messages)


def make_outcome(
    run: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    *,
    trained: Trained,
    seed: int,
    accuracy: tuple[float, float],
    seconds: float,
    warmup_seconds: float,
) -> Outcome:
    """Compute the demo's result from the run's record, its metrics and its rollout log.

    Args:
        run: The run as the API returns it after its end.
        metrics: The rows of the run's metrics log.
        trained: The result of ``read_trained``.
        seed: The demo's seed, for the result.
        accuracy: Held-out greedy accuracy before and after the run.
        seconds: Duration of the whole demo.
        warmup_seconds: Duration of making data, warmed-up model and run file; a part of ``seconds``.
    """
    progress = cast("dict[str, Any]", run["progress"])
    admitted, distinct = int(progress["groups_admitted"]), len(set(trained.groups))
    dropped = sum(int(number) for number in progress["groups_dropped"].values())
    before, after = accuracy
    config = cast("dict[str, Any]", run["config"])
    steps_per_batch = int(config["num_iterations"]) * int(config["steps_per_generation"])
    return Outcome(
        seed=seed,
        status=str(run["status"]),
        accuracy_before=before,
        accuracy_after=after,
        seconds=seconds,
        warmup_seconds=warmup_seconds,
        run_seconds=float(run["ended_at_s"] or 0.0) - float(run["started_at_s"] or 0.0),
        steps=int(progress["step"]),
        batches=math.ceil(int(progress["step"]) / steps_per_batch),
        takes_turns=int(config["max_staleness"]) + 1 < 2 * steps_per_batch,
        staleness_mean=_mean(metrics, "staleness/mean"),
        staleness_max=max(_values(metrics, "staleness/max"), default=0.0),
        pushes=int(progress["pushes"]),
        pushes_confirmed=int(progress["pushes_confirmed"]),
        groups_admitted=admitted,
        groups_trained=distinct,
        groups_dropped=dropped,
        groups_lost=admitted - distinct - dropped,
        groups_left_over=int(progress["groups_dropped"].get("run_ended", 0)),
        groups_trained_twice=len(trained.groups) - distinct,
        generated_tokens_per_s=_rate(metrics, "throughput/generated_tokens_per_s"),
        tool_calls=trained.tool_calls,
        tool_failures=trained.tool_failures,
        turns_mean=trained.turns_mean,
        drift_tokens=trained.drift_tokens,
    )


def _values(metrics: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in metrics if isinstance(row.get(name), int | float)]


def _mean(metrics: Sequence[Mapping[str, Any]], name: str) -> float:
    values = _values(metrics, name)
    return sum(values) / len(values) if values else 0.0


def _rate(metrics: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the mean of a rate over the steps, weighted by step time; 0 if no step has the rate."""
    rows = [row for row in metrics if row.get(name) is not None and row.get("step_time")]
    seconds = sum(float(row["step_time"]) for row in rows)
    return sum(float(row[name]) * float(row["step_time"]) for row in rows) / seconds if seconds else 0.0
