"""Formats the result of `headrace rewards check`: a table of completions, and a summary.

Both show how a trainer would treat each group, computed with the trainer's own functions.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from headrace.reward_check.row_groups import RowGroup, RowGroups
from headrace.reward_check.trial import Trial
from headrace.terminal import printable
from services.trainer.objective.advantages import combined_rewards, group_advantages, is_scorable
from shared.messages import RewardOutcome, is_failure

_MAX_SHOWN = 44
_STYLES = {"scored": "green", "not_applicable": "dim"}


@dataclass(frozen=True)
class GroupView:
    """The rewards and advantages that a trainer would compute for one prompt group, and the group's fate.

    Args:
        rewards: The weighted sum of rewards for each completion; None for an unscored completion.
        advantages: One for each completion; None if too few completions are scored, or all rewards are equal.
        fate: ``trained``, ``zero_std`` (all rewards are equal) or ``unscorable`` (fewer than two are scored).
    """

    rewards: tuple[float | None, ...]
    advantages: tuple[float, ...] | None
    fate: str


def training_view(outcomes: Sequence[RewardOutcome]) -> GroupView:
    """Compute how a trainer would treat a prompt group, given the function's outcome for each completion."""
    rewards_G = combined_rewards([(outcome,) for outcome in outcomes])
    rewards = tuple(float(reward) if np.isfinite(reward) else None for reward in rewards_G)
    if not is_scorable(rewards_G):
        return GroupView(rewards, None, "unscorable")
    advantages_G = group_advantages(rewards_G, scale="group")
    if advantages_G is None:
        return GroupView(rewards, None, "zero_std")
    return GroupView(rewards, tuple(float(advantage) for advantage in advantages_G), "trained")


def table(groups: Sequence[RowGroup], trial: Trial) -> Table:
    """Return a table with the outcome, value and advantage of each completion."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("row", "completion", "outcome", "value", "advantage", "detail"):
        view.add_column(column, justify="right" if column in ("row", "value", "advantage") else "left")
    for group, outcomes in zip(groups, trial.outcomes, strict=True):
        fate = training_view(outcomes)
        for index, (text, outcome) in enumerate(zip(group.completions, outcomes, strict=True)):
            view.add_row(
                str(group.row) if index == 0 else "",
                Text(_shortened(text)),
                Text(outcome.outcome, style=_STYLES.get(outcome.outcome, "red")),
                "-" if outcome.value is None else f"{outcome.value:.4g}",
                "-" if fate.advantages is None else f"{fate.advantages[index]:+.3f}",
                Text(printable(outcome.detail + _components(outcome))),
            )
    return view


def summary(name: str, read: RowGroups, trial: Trial) -> Iterator[str]:
    """Yield the lines of the summary: the function, its outcomes, values and latency, and the trained groups."""
    outcomes = [outcome for group in trial.outcomes for outcome in group]
    inspected = trial.inspected
    yield f"function:    {name}, {inspected.kind}{f', version {inspected.version}' if inspected.version else ''}"
    if inspected.summary:
        yield f"says:        {inspected.summary}"
    yield f"completions: {read.completions_are}; completion_ids are their UTF-8 bytes, without a tokenizer"
    missing = [" or ".join(names) for names in inspected.required_columns if not set(names) & set(read.columns)]
    if missing:
        yield f"missing:     the data set has no column {', '.join(missing)}, which the function needs"
    counts = Counter(outcome.outcome for outcome in outcomes)
    yield f"outcomes:    {', '.join(f'{count} {outcome}' for outcome, count in counts.most_common())}"
    values = [outcome.value for outcome in outcomes if outcome.value is not None]
    if values:
        yield f"values:      {min(values):.4g} to {max(values):.4g}, mean {statistics.fmean(values):.4g}"
    latencies = [group[0].latency_s for group in trial.outcomes]
    median, most = _time(statistics.median(latencies)), _time(max(latencies))
    yield f"latency:     median {median}, most {most}, for the completions of one row"
    yield from _fates([training_view(group) for group in trial.outcomes])
    for problem in read.problems:
        yield f"left out:    {problem}"


def has_failed(trial: Trial) -> bool:
    """Whether the function failed on any completion."""
    return any(is_failure(outcome.outcome) for group in trial.outcomes for outcome in group)


def _fates(views: Sequence[GroupView]) -> Iterator[str]:
    counts = Counter(view.fate for view in views)
    yield f"trained on:  {counts['trained']} of {len(views)} groups"
    if counts["unscorable"]:
        yield f"             {counts['unscorable']} dropped as unscorable: fewer than two completions have a reward"
    if counts["zero_std"]:
        yield (
            f"             {counts['zero_std']} with equal rewards: advantages of 0, or dropped as zero_std "
            "with drop_zero_std_groups"
        )


def _components(outcome: RewardOutcome) -> str:
    return "".join(f" {name}={value:.4g}" for name, value in outcome.components.items())


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{1000 * seconds:.1f} ms"


def _shortened(text: str) -> str:
    plain = printable(" ".join(text.split()))
    return plain if len(plain) <= _MAX_SHOWN else "…" + plain[-_MAX_SHOWN + 1 :]
