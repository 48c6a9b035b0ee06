"""Turns what the reward functions said into one advantage a completion.

    outcomes of G completions --combined_rewards--> rewards_G --group_advantages--> advantages_G
                                (NaN = unscored)

A failed reward function is never a zero: its completion is unscored, and is left out of the mean and of the std here,
and of the loss by whoever builds the training rows. Group-relative advantages: DeepSeekMath, arXiv 2402.03300,
section 4.1.2.

    G  completions in a group
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from shared.messages import RewardOutcome

Rewards = npt.NDArray[np.float64]

STD_EPSILON = 1e-4
"""Added to the std before dividing by it, as TRL's GRPOTrainer does."""

_HARMLESS = ("scored", "not_applicable")


def combined_rewards(rewards: Sequence[Sequence[RewardOutcome]]) -> Rewards:
    """Return one reward for each completion: the weighted sum of what its reward functions said.

    A function that does not apply is left out of the sum. A completion for which a function failed, or to which none
    applies, is unscored: NaN.

    Args:
        rewards: For each completion, one outcome a reward function.
    """
    return np.array([_combined(outcomes) for outcomes in rewards], dtype=np.float64)


def _combined(outcomes: Sequence[RewardOutcome]) -> float:
    if any(outcome.outcome not in _HARMLESS for outcome in outcomes):
        return float("nan")
    terms = [outcome.weight * outcome.value for outcome in outcomes if outcome.value is not None]
    return sum(terms) if terms else float("nan")


def is_scorable(rewards_G: Rewards) -> bool:
    """Whether at least two completions are scored, so that one can be told from another."""
    return int(np.isfinite(rewards_G).sum()) >= 2


def group_advantages(rewards_G: Rewards, *, scale: Literal["group", "none"]) -> Rewards | None:
    """Return ``(r - mean) / (std + 1e-4)`` over the scored of one group, or None if the group teaches nothing.

    Equality is tested on the rewards: in float32 seven rewards of 0.1 have a std of 7e-9, and dividing by it invents an
    advantage of 1. The std has Bessel's correction, as torch's has.

    Args:
        rewards_G: Rewards of one group; NaN is unscored, gets advantage 0, and must be left out of the loss.
        scale: ``"none"`` leaves the division out (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Returns:
        None if all scored rewards are equal, or fewer than two are scored (tell them apart with `is_scorable`).
    """
    is_scored_G = np.isfinite(rewards_G)
    scored = rewards_G[is_scored_G]
    if scored.size < 2 or bool((scored == scored[0]).all()):
        return None
    centred = scored - scored.mean()
    advantages_G = np.zeros(rewards_G.shape, dtype=np.float64)
    advantages_G[is_scored_G] = centred / (scored.std(ddof=1) + STD_EPSILON) if scale == "group" else centred
    return advantages_G
