"""Formats the results of one or more trials as the tables in docs/reliability.md."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.chaos.judge import Verdict
from benchmarks.chaos.record import FaultRecord, TrialRecord


def tables(trials: Sequence[TrialRecord]) -> str:
    """Return the totals, and a line for each victim and fault, as Markdown."""
    return f"{totals(trials)}\n\n{by_victim_and_fault(fault for trial in trials for fault in trial.faults)}"


def totals(trials: Sequence[TrialRecord]) -> str:
    """Return the totals over all trials, as a Markdown table."""
    runs = [run for trial in trials for run in trial.runs]
    faults = [fault for trial in trials for fault in trial.faults]
    dropped = Counter[str]()
    for run in runs:
        dropped.update(run.dropped)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "0"
    loads = [load for trial in trials for load in trial.loads]
    rows = {
        "seeds": ", ".join(str(trial.seed) for trial in trials),
        "release": ", ".join(sorted({trial.release for trial in trials})),
        "load average of the machine": f"{statistics.median(loads):.1f}, up to {max(loads):.1f}" if loads else "",
        "hours": f"{sum(trial.seconds for trial in trials) / 3600:.1f}",
        "faults": f"{len(faults)}, of them {sum(fault.is_one_of_a_pair for fault in faults)} in pairs",
        "runs": ", ".join(f"{count} {status}" for status, count in sorted(Counter(run.status for run in runs).items())),
        "steps that survived": f"{sum(run.steps for run in runs)}",
        "groups admitted": f"{sum(run.admitted for run in runs)}",
        "groups trained": f"{sum(run.trained for run in runs)}",
        "groups dropped, by reason": reasons,
        "groups lost": f"{sum(len(run.lost) for run in runs)}",
        "groups trained twice": f"{sum(len(run.twice) for run in runs)}",
        **_turns(runs),
        "highest staleness": f"{max((run.max_staleness for run in runs), default=0)}",
        "other promises broken": f"{sum(len(run.broken) for run in runs)}",
        "runs that stalled": f"{sum(len(trial.stood) for trial in trials)}",
        "processes left behind": f"{sum(len(trial.orphans) for trial in trials)}",
    }
    return "\n".join(["| what | number |", "|---|---|", *(f"| {what} | {number} |" for what, number in rows.items())])


def sums(trials: Sequence[TrialRecord]) -> dict[str, int | float]:
    """Return the totals over all trials, for machines."""
    runs = [run for trial in trials for run in trial.runs]
    return {
        "faults": sum(len(trial.faults) for trial in trials),
        "runs": len(runs),
        "seconds": round(sum(trial.seconds for trial in trials), 1),
        "groups_trained": sum(run.trained for run in runs),
        "groups_lost": sum(len(run.lost) for run in runs),
        "groups_twice": sum(len(run.twice) for run in runs),
        "tool_calls": sum(run.tool_calls for run in runs),
        "turns_sampled": sum(run.turns_sampled for run in runs),
        "turns_recorded": sum(run.turns_recorded for run in runs),
        "turns_sampled_twice": sum(run.turns_sampled_twice for run in runs),
        "promises_broken": sum(len(run.broken) for run in runs),
        "stalled": sum(len(trial.stood) for trial in trials),
        "left_behind": sum(len(trial.orphans) for trial in trials),
    }


def by_victim_and_fault(faults: Iterable[FaultRecord]) -> str:
    """Return how long training took to recover from each fault, separately for single faults and pairs."""
    cells: dict[tuple[str, str], list[FaultRecord]] = {}
    for fault in faults:
        cells.setdefault((fault.victim, fault.kind), []).append(fault)
    lines = [
        "| victim | fault | number | recovery, median, s | worst, s | worst in a pair, s | stalled |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for (victim, kind), found in sorted(cells.items()):
        lone = [fault.recovery_s for fault in found if not fault.is_one_of_a_pair and fault.recovery_s is not None]
        paired = [fault.recovery_s for fault in found if fault.is_one_of_a_pair and fault.recovery_s is not None]
        lines.append(
            f"| {victim} | {kind} | {len(found)} | {_shown(statistics.median(lone) if lone else None)} "
            f"| {_shown(max(lone, default=None))} | {_shown(max(paired, default=None))} "
            f"| {sum(fault.stood for fault in found)} |"
        )
    return "\n".join(lines)


def _turns(runs: Sequence[Verdict]) -> dict[str, str]:
    """Return the rows about turns, if any run had turns of conversations."""
    if not any(run.turns_sampled for run in runs):
        return {}
    return {
        "tool calls of trained rollouts": f"{sum(run.tool_calls for run in runs)}",
        "turns sampled": f"{sum(run.turns_sampled for run in runs)}",
        "turns seen recorded": f"{sum(run.turns_recorded for run in runs)}",
        "recorded turns sampled again": f"{sum(run.turns_sampled_twice for run in runs)}",
    }


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"
