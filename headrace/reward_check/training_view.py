"""Predicts what a trainer would do with scored groups, by the trainer's own rules."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.trainer.objective.advantages import combined_rewards, group_advantages, is_scorable
from shared.messages import RewardOutcome


@dataclass(frozen=True)
class GroupView:
    """The trainer's view of one group.

    Args:
        rewards: The weighted sum of rewards for each completion; None if it is unscored.
        advantages: One for each completion; None if the group is not trained on, or teaches nothing.
        fate: ``trained``, ``zero_std`` or ``unscorable``.
    """

    rewards: tuple[float | None, ...]
    advantages: tuple[float, ...] | None
    fate: str


def training_view(outcomes: Sequence[RewardOutcome]) -> GroupView:
    """Return what a trainer would do with a group, given one outcome for each completion."""
    rewards_G = combined_rewards([(outcome,) for outcome in outcomes])
    rewards = tuple(float(reward) if np.isfinite(reward) else None for reward in rewards_G)
    if not is_scorable(rewards_G):
        return GroupView(rewards, None, "unscorable")
    advantages_G = group_advantages(rewards_G, scale="group")
    if advantages_G is None:
        return GroupView(rewards, None, "zero_std")
    return GroupView(rewards, tuple(float(advantage) for advantage in advantages_G), "trained")
