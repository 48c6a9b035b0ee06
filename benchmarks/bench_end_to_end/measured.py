"""What a side reports, and the numbers that follow from it. Pure.

steps of a run: [warm-up ...] | [measured .........................]
                              ^ every clock begins at the end of the last warm-up step
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

NUM_CORES = 2
"""Cores that the limit has."""


@dataclass(frozen=True)
class Step:
    """One optimizer step: when it ended, the sampled tokens that it trained on, and their mean reward."""

    at_s: float
    num_tokens: float
    reward: float


@dataclass(frozen=True)
class Measured:
    """One run of one side.

    Attributes:
        steps: All steps, the warm-up's first.
        num_warmup_steps: Steps that are not measured; at least 1.
        cpu_s: User and system time of all the side's processes in the measured steps.
        accuracy: Greedy accuracy of the final model on held-out prompts, if the work has it.
        staleness: Mean staleness of the measured steps.
        longest: Tokens of the longest completion of the measured steps.
    """

    steps: Sequence[Step]
    num_warmup_steps: int
    cpu_s: float
    accuracy: float | None = None
    staleness: float = 0.0
    longest: float = 0.0

    def seconds(self) -> float:
        """Return the wall-clock time of the measured steps."""
        return self.steps[-1].at_s - self.steps[self.num_warmup_steps - 1].at_s

    def num_tokens(self) -> float:
        """Return the sampled tokens of the measured steps."""
        return sum(step.num_tokens for step in self.steps[self.num_warmup_steps :])

    def tokens_per_s(self) -> float:
        """Return sampled tokens a second."""
        return self.num_tokens() / self.seconds()

    def steps_per_s(self) -> float:
        """Return optimizer steps a second."""
        return (len(self.steps) - self.num_warmup_steps) / self.seconds()

    def seconds_to(self, reward: float, *, smooth_steps: int) -> float | None:
        """Return the time until the mean reward of the last ``smooth_steps`` steps was reached, or None."""
        began_at = self.steps[self.num_warmup_steps - 1].at_s
        for last in range(smooth_steps, len(self.steps) + 1):
            window = self.steps[last - smooth_steps : last]
            if sum(step.reward for step in window) / smooth_steps >= reward:
                return max(0.0, window[-1].at_s - began_at)
        return None

    def final_reward(self, *, smooth_steps: int) -> float:
        """Return the mean reward of the last ``smooth_steps`` steps."""
        return statistics.mean(step.reward for step in self.steps[-smooth_steps:])


@dataclass
class Rounds:
    """The runs of one work by side. Runs with the same index were made one after the other."""

    by_side: dict[str, list[Measured]] = field(default_factory=dict[str, list[Measured]])

    def add(self, side: str, run: Measured) -> None:
        """Add the next run of a side."""
        self.by_side.setdefault(side, []).append(run)

    def median(self, side: str, number: Callable[[Measured], float | None]) -> float | None:
        """Return the median of a number over a side's runs; None if a run does not have it, or there is none."""
        found = [number(run) for run in self.by_side.get(side, ())]
        known = [one for one in found if one is not None]
        return statistics.median(known) if known and len(known) == len(found) else None

    def ratios(self, side: str, other: str) -> list[float]:
        """Return tokens a second of ``side`` divided by those of ``other``, by round."""
        ours, theirs = self.by_side.get(side, []), self.by_side.get(other, [])
        return [mine.tokens_per_s() / his.tokens_per_s() for mine, his in zip(ours, theirs, strict=False)]

    def over(self, side: str, other: str) -> float | None:
        """Return the median of these ratios, or None without a pair."""
        ratios = self.ratios(side, other)
        return round(statistics.median(ratios), 3) if ratios else None


@dataclass(frozen=True)
class Bare:
    """CPU seconds of the two parts that cannot be left out, each alone, for a sampled token."""

    decoding_s_per_token: float
    math_s_per_token: float

    def share_of_limit(self, run: Measured) -> float:
        """Return the time that a run's tokens need at least, divided by the time that they took."""
        cpu_s = (self.decoding_s_per_token + self.math_s_per_token) * run.num_tokens()
        return cpu_s / NUM_CORES / run.seconds()


def rotated(sides: Sequence[str], number: int) -> list[str]:
    """Return the sides in the order of round ``number``: each round begins with another side."""
    first = number % len(sides)
    return [*sides[first:], *sides[:first]]


def async_over_sync(rounds: Rounds, bounds: Mapping[int, str]) -> dict[str, float]:
    """Return tokens a second of each bound divided by those of max_staleness 0, in the median round."""
    if 0 not in bounds:
        return {}
    over = {str(bound): rounds.over(side, bounds[0]) for bound, side in sorted(bounds.items()) if bound}
    return {bound: ratio for bound, ratio in over.items() if ratio is not None}
