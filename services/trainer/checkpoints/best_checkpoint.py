"""Finds a run's best checkpoint from its evaluations, and decides when the run stops early.

    evaluations, oldest first --judge--> step and value of the best, evaluations since the last improvement

The rules are transformers' (Trainer and EarlyStoppingCallback). An equal value is not better, so the earlier
step stays the best. An improvement of at most ``threshold`` moves the best, but does not count for early stopping.
Evaluations whose value is missing or not finite are skipped. So are evaluations with missing groups, or with reward
functions that failed for more prompts than the run tolerates: the mean over some prompts cannot be compared with the
mean over all of them.

The state follows from the evaluations in the run's log, which a resumed trainer cuts back to its checkpoint and judges
again. So nothing else has to be stored.
"""

import logging
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from services.trainer.run_outputs import read_evaluations
from shared.errors import UserError
from shared.redis.run_record import BestEvaluation
from shared.run_options.keeping import ABOUT_BEST
from shared.run_options.run_config import RunConfig, parse_run_config

log = logging.getLogger(__name__)

_DONE, _MISSING, _UNSCORED = "eval_groups/done", "eval_groups/missing", "eval_groups/unscored"
_NOT_OF_ROLLOUTS = ("eval_groups/", "eval_policy_version/", "eval_runtime", "eval_skipped")
"""Beginnings of metrics that say nothing about the policy."""


@dataclass(frozen=True)
class BestRule:
    """The rule by which a run compares its evaluations and stops early.

    Args:
        metric: The metric that decides, with the prefix ``eval_``.
        is_greater_better: Whether the larger value is the better one.
        patience: Evaluations in a row without an improvement after which the run ends; None for no early stopping.
        threshold: Only a larger gain over the best value counts as an improvement for early stopping.
        max_unscored: Largest share, from 0 to 1, of an evaluation's prompts whose reward functions may fail.
    """

    metric: str
    is_greater_better: bool = True
    patience: int | None = None
    threshold: float = 0.0
    max_unscored: float = 0.0

    @classmethod
    def of(cls, config: RunConfig) -> Self | None:
        """Return the rule that a run's config sets; None if the run does not look for its best checkpoint."""
        if not config.finds_best:
            return None
        return cls(
            config.best_metric_name,
            is_greater_better=config.is_greater_better,
            patience=config.early_stopping_patience,
            threshold=config.early_stopping_threshold,
            max_unscored=config.reward_failure_threshold,
        )


class BestCheckpoint:
    """Keeps the step and value of a run's best evaluation, and counts evaluations without an improvement.

    Args:
        rule: Compares evaluations.
        evaluations: The evaluations so far, oldest first, as lines of the run's evaluations.jsonl.

    Raises:
        UserError: The evaluations do not have the metric of the rule.
    """

    def __init__(self, rule: BestRule, evaluations: Iterable[Mapping[str, Any]] = ()) -> None:
        self.rule = rule
        self.step: int | None = None
        """Step of the best evaluation; None before the first with a value."""
        self.value = math.nan
        self.num_without_improvement = 0
        """Evaluations since the last improvement."""
        for line in evaluations:
            self.judge(line, step=int(line["step"]))

    def judge(self, metrics: Mapping[str, Any], *, step: int) -> bool:
        """Compare the evaluation of ``step`` with the best one. Return whether it is the new best; False if skipped.

        Raises:
            UserError: No evaluation has had the metric, and this one does not either.
        """
        value = self._value(metrics)
        if value is None:
            return False
        gain = math.inf
        if self.step is not None:
            gain = value - self.value if self.rule.is_greater_better else self.value - value
        self.num_without_improvement = 0 if gain > self.rule.threshold else self.num_without_improvement + 1
        if gain > 0:
            self.step, self.value = step, value
        return gain > 0

    def _value(self, metrics: Mapping[str, Any]) -> float | None:
        if self.num_missing(metrics):
            return None
        if self.rule.metric not in metrics:
            if self.step is None and metrics.get(_DONE):
                raise UserError(_missing(self.rule.metric, metrics), field="metric_for_best_model")
            return None
        value = metrics[self.rule.metric]
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def num_missing(self, metrics: Mapping[str, Any]) -> int:
        """Return how many prompts of an evaluation have no score; 0 if they are so few that the evaluation counts."""
        missing, unscored, done = (int(metrics.get(name) or 0) for name in (_MISSING, _UNSCORED, _DONE))
        return missing + unscored if missing or unscored > self.rule.max_unscored * done else 0

    @property
    def stops_early(self) -> bool:
        """Whether the run should end now, because its evaluations no longer improve."""
        return self.rule.patience is not None and self.num_without_improvement >= self.rule.patience

    def why_it_stops(self) -> str:
        """Return the reason for ending the run early, as a sentence without a full stop."""
        number = self.num_without_improvement
        more = f" by more than {self.rule.threshold:g}" if self.rule.threshold else ""
        evaluations = "in the last evaluation" if number == 1 else f"in the last {number} evaluations"
        return (
            f"stopped early: {self.rule.metric} did not improve{more} {evaluations}; the best is {self.value:.6g} at "
            f"step {self.step}"
        )

    def seen(self) -> BestEvaluation | None:
        """Return the best evaluation in the form that the run's record stores; None before the first."""
        if self.step is None:
            return None
        return BestEvaluation(
            step=self.step,
            metric=self.rule.metric,
            value=self.value,
            num_without_improvement=self.num_without_improvement,
        )


def best_in_files(run_dir: Path, config: Mapping[str, Any]) -> BestCheckpoint | None:
    """Return a run's best checkpoint, computed from its evaluations.jsonl.

    Returns None if the run does not look for its best checkpoint, or if its config or its evaluations are not usable,
    for example because another release wrote them.
    """
    if not any(config.get(name) for name in ABOUT_BEST):
        return None
    try:
        rule = BestRule.of(parse_run_config(dict(config)))
        lines, _ = read_evaluations(run_dir, after_step=-1, limit=sys.maxsize)
        return None if rule is None else BestCheckpoint(rule, lines)
    except UserError as error:  # another release has written the config
        log.warning("the best checkpoint of %s is not known: %s", run_dir, error)
        return None


def _missing(name: str, metrics: Mapping[str, Any]) -> str:
    there = sorted(each for each in metrics if each.startswith("eval_") and not each.startswith(_NOT_OF_ROLLOUTS))
    return (
        f"metric_for_best_model names {name}, which the evaluations of the run do not have; they have "
        f"{', '.join(there)}"
    )
