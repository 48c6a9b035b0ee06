"""Counts the recent failures of each reward function, and decides when there are too many to go on.

    judged groups --note---------+
    dead letters  --note_buried--+--> [the newest reward_failure_window] --verdict--> function, share, last failure
    the test group --note--> has_recovered

The window must be full. A function fails too often when failures are more than ``reward_failure_threshold`` of its
outcomes. A run also should not go on if every group of the window was unscorable, at any share of failures: several
functions may each fail for some completions, no function may apply, or the groups became dead letters. A test group,
which tests in a pause whether rewards work again, is judged by itself, by the same two rules.

A rollout that was lost, because a tool or an environment failed, was scored by no function. Lost rollouts are counted
by themselves, as if the rollouts were one more function: its outcomes are all rollouts, its failures the lost ones.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from services.trainer.objective.advantages import GroupOutcomes
from shared.messages import RewardOutcome, is_failure
from shared.run_options.run_config import RunConfig

_MAX_DETAIL = 300
_ROLLOUTS = ""
"""The rollouts themselves, among the names of the functions."""


@dataclass(frozen=True)
class Verdict:
    """The reason to pause a run whose rewards fail.

    Attributes:
        reason: A sentence without its full stop.
        reward_func: The function that failed most often; empty if no function failed, or if rollouts were lost more
            often.
        failed_ratio: Share of its outcomes that were failures, or of the rollouts that were lost, from 0 to 1.
        last_failure: Outcome and detail of its last failure, or why the last rollout was lost or the last group
            buried; empty if neither.
    """

    reason: str
    reward_func: str
    failed_ratio: float
    last_failure: str


@dataclass(frozen=True)
class _Judged:
    """One group: how many outcomes each function had, and how many of them were failures."""

    num_outcomes: Counter[str]
    num_failed: Counter[str]
    is_scorable: bool


class RewardFailures:
    """Counts reward failures in the newest ``reward_failure_window`` groups of one run, and decides when to pause it.

    Args:
        config: The run's settings.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._judged: deque[_Judged] = deque(maxlen=config.reward_failure_window)
        self._last_failures: dict[str, str] = {}
        self._last_buried = ""
        self._left_out: set[int] = set()
        self._test_group: int | None = None
        self.has_recovered = False
        """Whether the test group came back without problems."""

    def leave_out(self, numbers: Iterable[int]) -> None:
        """Ignore these groups: an earlier trainer may have counted them, and their failures may be outdated."""
        self._left_out.update(numbers)

    def note(self, number: int, outcomes: GroupOutcomes, *, is_scorable: bool) -> None:
        """Count the reward outcomes of a group, whether enough of its completions were scored or not.

        Args:
            number: The group's number.
            outcomes: The reward outcomes of each completion.
            is_scorable: Whether enough completions were scored.
        """
        if number in self._left_out:
            return
        judged = _judged(outcomes, is_scorable=is_scorable)
        for name, detail in _failures(outcomes):
            self._last_failures[name] = detail
        self._judged.append(judged)
        if number == self._test_group:
            self._test_group = None
            self.has_recovered = is_scorable and not self._is_too_often(_worst([judged])[1])

    def note_buried(self, number: int, reason: str) -> None:
        """Count a group that became a dead letter as a group without scores. No reward function is blamed."""
        if number in self._left_out:
            return
        self._last_buried = reason[:_MAX_DETAIL]
        self._judged.append(_Judged(Counter(), Counter(), is_scorable=False))

    def expect_test_group(self, number: int) -> None:
        """Use this group, when it arrives, to decide whether the reward functions work again."""
        self._test_group = number

    def begin_anew(self) -> None:
        """Forget all groups: the run resumes, and earlier failures are outdated."""
        self._judged.clear()
        self._last_failures.clear()
        self._last_buried = ""
        self._test_group, self.has_recovered = None, False

    def last_failure(self) -> str:
        """Return the last failure of the function that fails most often, or the reason of the last dead letter.

        Lost rollouts count as failures of one more function. Returns an empty string if nothing failed.
        """
        name, _ = _worst(self._judged)
        return self._last_buried if name is None else self._last_failures.get(name, "")

    def verdict(self) -> Verdict | None:
        """Return the reason to pause the run; None if there is none, or if too few groups were counted so far."""
        count = len(self._judged)
        if count < self._config.reward_failure_window:
            return None
        name, failed_ratio = _worst(self._judged)
        last_failure = self.last_failure()
        groups = "the last group" if count == 1 else f"the last {count} groups"
        said = f"; it last said: {last_failure}" if last_failure else ""
        if self._is_too_often(failed_ratio):
            what = f"{failed_ratio:.0%} of the rollouts of {groups} were lost"
            if name:
                what = f"reward function {name} failed for {failed_ratio:.0%} of the completions of {groups}"
            reason = f"{what}, more than reward_failure_threshold={self._config.reward_failure_threshold:g}{said}"
        elif not any(judged.is_scorable for judged in self._judged):
            if name:
                why = f"reward function {name} failed most often, for {failed_ratio:.0%} of the completions{said}"
            elif name == _ROLLOUTS:
                why = f"{failed_ratio:.0%} of the rollouts were lost{said}"
            elif self._last_buried:
                why = f"they became dead letters, the last because {self._last_buried}"
            else:
                why = "no reward function applies to them"
            reason = f"no group of {groups} had {self._config.min_scored_completions} scored completions: {why}"
        else:
            return None
        return Verdict(reason, reward_func=name or "", failed_ratio=failed_ratio, last_failure=last_failure)

    def _is_too_often(self, failed_ratio: float) -> bool:
        return failed_ratio > self._config.reward_failure_threshold


def first_failure(outcomes: GroupOutcomes) -> str:
    """Return the first failure in a group, with the name of its function; empty if nothing failed."""
    for name, detail in _failures(outcomes):
        return f"{name}: {detail}" if name else f"a rollout was lost: {detail}"
    return ""


def _judged(outcomes: GroupOutcomes, *, is_scorable: bool) -> _Judged:
    scored = [outcome for of_rollout in outcomes if not _is_lost(of_rollout) for outcome in of_rollout]
    num_outcomes = Counter(outcome.name for outcome in scored)
    num_outcomes[_ROLLOUTS] = len(outcomes)
    return _Judged(num_outcomes, Counter(name for name, _ in _failures(outcomes)), is_scorable)


def _worst(groups: "deque[_Judged] | list[_Judged]") -> tuple[str | None, float]:
    """Return the function with the largest share of failures, and that share; None and 0 if nothing failed."""
    shares: dict[str, float] = {}
    for name in dict.fromkeys(name for judged in groups for name in judged.num_outcomes):
        num_failed = sum(judged.num_failed[name] for judged in groups)
        shares[name] = num_failed / max(1, sum(judged.num_outcomes[name] for judged in groups))
    worst = max(shares, key=lambda name: shares[name], default=None)
    return (worst, shares[worst]) if worst is not None and shares[worst] else (None, 0.0)


def _failures(outcomes: GroupOutcomes) -> Iterator[tuple[str, str]]:
    """Yield the name and the detail of each failure; one for a lost rollout."""
    for of_rollout in outcomes:
        if _is_lost(of_rollout):
            yield _ROLLOUTS, of_rollout[0].detail[:_MAX_DETAIL]
            continue
        for outcome in of_rollout:
            if is_failure(outcome.outcome):
                yield outcome.name, f"{outcome.outcome} {outcome.detail[:_MAX_DETAIL]}".strip()


def _is_lost(of_rollout: Sequence[RewardOutcome]) -> bool:
    return any(outcome.outcome == "lost" for outcome in of_rollout)
