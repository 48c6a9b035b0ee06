"""Keeps the state of one evaluation under way: groups in flight, groups that came back, and their metrics as in TRL.

It does no I/O; evaluation.py sends and reads the groups.
"""

import time
from dataclasses import dataclass, field

import numpy as np

from services.trainer.groups.waiting_group import WaitingGroup
from services.trainer.objective.advantages import combined_rewards
from services.trainer.telemetry.step_metrics import TrainedGroup, rollout_metrics
from shared.messages import ScoredGroup, is_failure, oldest_policy_version
from shared.run_options.run_config import RunConfig

_FEWEST_LOOKS = 5
"""An evaluation is given up after at least so many looks for a group."""


@dataclass
class RunningEvaluation:
    """An evaluation under way: the groups that it has sent and received, and the time since the last one."""

    step: int
    num_prompts: int
    num_skipped: int
    """Number of further evaluations that were due since the last one and are replaced by this one."""
    began_at: float
    next_index: int = 0
    in_flight: dict[str, int] = field(default_factory=dict[str, int])
    """Group id -> index of the prompt."""
    unsent: dict[str, int] = field(default_factory=dict[str, int])
    """The groups in flight that Redis has lost, or had no room for."""
    groups: list[TrainedGroup] = field(default_factory=list[TrainedGroup])
    num_unusable: int = 0
    num_missing: int = 0
    waited_s: float = 0.0
    """Seconds since a group last came back or was sent."""
    looked_at: float = 0.0
    """When they were last counted, in monotonic seconds."""

    def see_sign(self) -> None:
        """Count the time without a group from now on, because a group arrived or was sent, or none can arrive yet."""
        self.waited_s, self.looked_at = 0.0, time.monotonic()

    def is_given_up(self, *, idle_s: float) -> bool:
        """Return whether no group came back for ``idle_s`` seconds.

        The trainer reads no groups while it trains a batch, and prompts of training may delay prompts of evaluation.
        So the time between two calls counts as at most a fifth of ``idle_s``.
        """
        now = time.monotonic()
        self.waited_s += min(now - self.looked_at, idle_s / _FEWEST_LOOKS)
        self.looked_at = now
        return self.waited_s >= idle_s

    def ended(self, group_id: str) -> int | None:
        """Remove a group from the groups in flight, and return its prompt's index; None if it is not in flight."""
        self.unsent.pop(group_id, None)
        return self.in_flight.pop(group_id, None)

    def add(self, index: int, group: ScoredGroup) -> None:
        """Add the scored group of the prompt with this index."""
        rewards_G = combined_rewards([rollout.rewards for rollout in group.rollouts])
        self.groups.append(
            TrainedGroup(
                waiting=WaitingGroup(index, group, oldest_policy_version(group)),
                rewards_G=rewards_G,
                advantages_G=np.zeros_like(rewards_G),
                has_signal=False,
            )
        )

    def in_order(self) -> list[TrainedGroup]:
        """Return the groups that came back, in the order of their prompts."""
        return sorted(self.groups, key=lambda group: group.waiting.number)

    def metrics(self, config: RunConfig) -> dict[str, float]:
        """Return TRL's evaluation metrics over the groups that came back, their policy versions, and counts."""
        groups = self.in_order()
        metrics: dict[str, float] = {}
        if groups:
            of_rollouts = rollout_metrics(groups, policy_version=self.step, config=config)
            sampled = [group.waiting for group in groups if any(each.rows for each in group.waiting.group.rollouts)]
            versions = [float(waiting.oldest_policy_version) for waiting in sampled] or [np.nan]
            metrics = {name: value for name, value in of_rollouts.items() if not name.startswith("staleness/")} | {
                "policy_version/min": min(versions),
                "policy_version/mean": float(np.mean(versions)),
                "policy_version/max": max(versions),
            }
        metrics |= {
            "groups/done": float(len(groups)),
            "groups/missing": float(self.num_missing),
            "groups/unscored": float(sum(map(_is_unscored, groups))),
            "groups/unusable": float(self.num_unusable),
            "skipped": float(self.num_skipped),
            "runtime": time.monotonic() - self.began_at,
        }
        return {f"eval_{name}": value for name, value in metrics.items()}


def _is_unscored(group: TrainedGroup) -> bool:
    """Return whether no completion of a group has a reward, and a reward function or a rollout failed."""
    given = [reward for rollout in group.waiting.group.rollouts for reward in rollout.rewards]
    return bool(np.isnan(group.rewards_G).all()) and any(is_failure(reward.outcome) for reward in given)
