"""Decides which promises a run broke: a pure function of its history.

admitted = trained + dropped(reason)   at the end of a run, each number once
rollout log = ledger                   written independently of each other: the same groups, each in one step
staleness <= max_staleness             of every token that was trained
versions rise                          in a completion, and from push to push of one incarnation
no step is lost below a checkpoint     unless that checkpoint was damaged
nothing contradicts anything           agreement.py
no recorded turn is sampled again      turns.py
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.agreement import contradictions
from benchmarks.chaos.history import RunHistory, numbers
from benchmarks.chaos.turns import TurnCounts, sentence

_EPOCH_BITS = 20
"""A push's epoch holds the trainer's incarnation above these lower bits (docs/weight-push.md)."""
_MAX_NAMED = 8


@dataclass
class Verdict:
    """The verdict on a run.

    Attributes:
        lost: Admitted groups that the ledger neither counts as trained nor as dropped.
        twice: Groups that were trained twice, or both trained and dropped.
        tool_calls: Tool calls of the rollouts that were trained. This and the counts below are 0 without a tool.
        turns_sampled: Turns that generators sampled.
        turns_recorded: Turns that were seen recorded in Redis.
        turns_sampled_twice: Turns that were sampled again while they were recorded.
        broken: One sentence for each broken promise; empty if all were kept.
    """

    run_id: str
    status: str
    steps: int = 0
    admitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    lost: list[int] = field(default_factory=list[int])
    twice: list[int] = field(default_factory=list[int])
    max_staleness: int = 0
    tool_calls: int = 0
    turns_sampled: int = 0
    turns_recorded: int = 0
    turns_sampled_twice: int = 0
    broken: list[str] = field(default_factory=list[str])


def judge(history: RunHistory, *, has_ended: bool = True) -> Verdict:
    """Return the verdict on a run.

    Args:
        history: The run's history.
        has_ended: False for a stalled run that was given up. Its unsettled groups do not count as lost.
    """
    verdict = Verdict(history.run_id, history.status)
    broken = verdict.broken
    if has_ended and history.status not in ("finished", "stopped"):
        broken.append(f"the run {history.status}: {history.reason}")
    broken += [f"{place} is not JSON" for place in history.unreadable]
    if history.ledger is None:
        broken.append("the run has no checkpoint, and so no ledger")
        return verdict
    ended_well = has_ended and history.status in ("finished", "stopped")
    trained = _judge_ledger(history.ledger, verdict, must_be_settled=ended_well)
    _judge_rollouts(history, trained, verdict)
    _judge_steps(history, verdict)
    _judge_staleness(history, verdict)
    broken += _falling_versions(history)
    broken += _steps_lost_below_a_checkpoint(history)
    broken += contradictions(history, ended_well=ended_well)
    if verdict.lost:
        broken.append(f"{len(verdict.lost)} groups lost: {_named(verdict.lost)}")
    if verdict.twice:
        broken.append(f"{len(verdict.twice)} groups trained or settled twice: {_named(verdict.twice)}")
    return verdict


def judge_turns(turns: TurnCounts, verdict: Verdict) -> None:
    """Add the counts of a run's turns to its verdict."""
    verdict.turns_sampled, verdict.turns_recorded = turns.sampled, turns.recorded
    verdict.turns_sampled_twice = len(turns.again)
    if turns.again:
        verdict.broken.append(sentence(turns.again))


def _judge_ledger(ledger: Mapping[str, Any], verdict: Verdict, *, must_be_settled: bool) -> set[int]:
    """Account for every admission number, and return the numbers that were trained."""
    trained = numbers(ledger["trained"])
    dropped = {str(reason): numbers(runs) for reason, runs in ledger["dropped"].items()}
    admitted = int(ledger["admitted"])
    settled = Counter([*trained, *(number for group in dropped.values() for number in group)])
    verdict.admitted = admitted
    verdict.trained = len(trained)
    verdict.dropped = {reason: len(group) for reason, group in sorted(dropped.items()) if group}
    verdict.twice = sorted(number for number, times in settled.items() if times > 1)
    if must_be_settled:
        verdict.lost = [number for number in range(admitted) if number not in settled]
    if never := sorted(number for number in settled if not 0 <= number < admitted):
        verdict.broken.append(f"groups were settled that were never admitted: {_named(never)}")
    return set(trained)


def _judge_rollouts(history: RunHistory, trained: set[int], verdict: Verdict) -> None:
    """Compare the rollout log with the ledger, up to the newest checkpoint."""
    verdict.tool_calls = sum(int(row.get("tool_calls") or 0) for rows in history.rollouts.values() for row in rows)
    steps = {step: rows for step, rows in history.rollouts.items() if step <= history.ledger_step}
    groups = {step: {int(row["group_id"]) for row in rows} for step, rows in steps.items()}
    times = Counter(number for found in groups.values() for number in found)
    again = sorted(number for number, count in times.items() if count > 1)
    verdict.twice = sorted({*verdict.twice, *again})
    expected = range(1, history.ledger_step + 1)
    if missing := sorted(set(expected) - steps.keys()):
        verdict.broken.append(f"no rollouts of steps {_named(missing)}")
    if uneven := sorted(step for step, found in groups.items() if len(found) != history.groups_per_step):
        verdict.broken.append(f"steps {_named(uneven)} did not train {history.groups_per_step} groups")
    if unlogged := sorted(trained - times.keys()):
        verdict.broken.append(f"the ledger holds groups that no step trained: {_named(unlogged)}")
    if unknown := sorted(times.keys() - trained):
        verdict.broken.append(f"steps trained groups that the ledger does not hold: {_named(unknown)}")


def _judge_steps(history: RunHistory, verdict: Verdict) -> None:
    """Check that each step up to the newest checkpoint has one line of metrics, in order."""
    steps = [int(row["step"]) for row in history.metrics]
    verdict.steps = max(steps, default=0)
    survived = [step for step in steps if step <= history.ledger_step]
    if survived != list(range(1, history.ledger_step + 1)):
        odd = sorted({*range(1, history.ledger_step + 1)} ^ {*survived})
        what = f"steps {_named(odd)} are missing" if odd else "they are out of order or repeated"
        verdict.broken.append(f"metrics of {history.ledger_step} steps: {what}")


def _judge_staleness(history: RunHistory, verdict: Verdict) -> None:
    """Compare the bound with the staleness in the metrics and in the version spans of each rollout."""
    said = [int(row["staleness/max"]) for row in history.metrics if row.get("staleness/max") is not None]
    counted = [
        step - 1 - int(span[0])
        for step, rows in history.rollouts.items()
        for row in rows
        for span in row["policy_versions"]
    ]
    verdict.max_staleness = max([*said, *counted], default=0)
    if verdict.max_staleness > history.max_staleness:
        verdict.broken.append(f"staleness {verdict.max_staleness} was trained, above {history.max_staleness}")


def _falling_versions(history: RunHistory) -> Iterable[str]:
    """Yield each place where a version falls: within a completion, or between pushes of one incarnation."""
    for step, rows in history.rollouts.items():
        for row in rows:
            versions = [(int(span[3]), int(span[0])) for span in row["policy_versions"]]
            if versions != sorted(versions):
                yield f"step {step}, group {row['group_id']}: policy versions fall: {versions}"
    last: tuple[int, int] | None = None
    for push in history.pushes:
        version = (int(push["epoch"]) >> _EPOCH_BITS, int(push["policy_version"]))
        if last is not None and version < last:
            yield f"a push of version {version[1]} by incarnation {version[0]} came after {last[1]} by {last[0]}"
        last = version


def _steps_lost_below_a_checkpoint(history: RunHistory) -> Iterable[str]:
    """Yield each time that the run fell back below its newest undamaged checkpoint."""
    for earlier, later in itertools.pairwise(history.sightings):
        if later.step < earlier.saved_step:
            yield f"the run fell from step {earlier.step} to {later.step}, below its checkpoint {earlier.saved_step}"


def _named(found: list[int]) -> str:
    return ", ".join(map(str, found[:_MAX_NAMED])) + (", ..." if len(found) > _MAX_NAMED else "")
