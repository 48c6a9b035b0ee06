"""Chooses what the next step trains on, and drops what no step should.

    waiting --judge--> trainable          unscorable, truncated, zero_std, stale: dropped with that reason
    trainable --choose--> groups_per_step groups, oldest tokens first

Nothing is chosen while a step would push an unfinished group past ``max_staleness`` (staleness.py says why).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.trainer.advantages import combined_rewards, group_advantages, is_scorable
from services.trainer.ledger import Ledger, group_id
from services.trainer.scored_groups import ScoredGroups, WaitingGroup
from services.trainer.staleness import staleness, stragglers
from services.trainer.step_metrics import TrainedGroup
from shared.run_config import RunConfig

log = logging.getLogger(__name__)

UNSCORABLE, ZERO_STD, STALE, TRUNCATED = "unscorable", "zero_std", "stale", "truncated"


@dataclass(frozen=True)
class Batch:
    """The groups of one step, or none and what they are waited for."""

    groups: tuple[TrainedGroup, ...]
    waiting_for: str = ""


class BatchBuilder:
    """Decides over the waiting groups of one run.

    Args:
        config: Of the run.
        scored: The waiting groups.
        ledger: Told of every drop.
    """

    def __init__(self, config: RunConfig, *, scored: ScoredGroups, ledger: Ledger) -> None:
        self._config = config
        self._scored = scored
        self._ledger = ledger
        self._judged: dict[int, TrainedGroup] = {}
        self._dropped_since_step: dict[str, int] = {}
        self._last_failure = ""
        self.unscorable_in_a_row = 0

    def judge(self, waiting: WaitingGroup) -> None:
        """Compute a new group's advantages, or drop it."""
        rewards_G = combined_rewards([rollout.rewards for rollout in waiting.group.rollouts])
        if not is_scorable(rewards_G):
            self.unscorable_in_a_row += 1
            self._last_failure = first_failure(waiting)
            log.warning(
                "group %s has fewer than two scored completions: %s", group_id(waiting.number), self._last_failure
            )
            self.drop(waiting.number, UNSCORABLE)
            return
        self.unscorable_in_a_row = 0
        is_left_out_G = np.isnan(rewards_G)
        if self._config.mask_truncated_completions:
            is_left_out_G |= [rollout.is_truncated() for rollout in waiting.group.rollouts]
        if is_left_out_G.all():
            self.drop(waiting.number, TRUNCATED)
            return
        advantages_G = group_advantages(rewards_G, scale=self._config.scale_rewards)
        if advantages_G is None and self._config.drop_zero_std_groups:
            self.drop(waiting.number, ZERO_STD)
            return
        self._judged[waiting.number] = TrainedGroup(
            waiting=waiting,
            rewards_G=rewards_G,
            advantages_G=np.zeros_like(rewards_G) if advantages_G is None else advantages_G,
            has_signal=advantages_G is not None,
        )

    def drop(self, number: int, reason: str) -> None:
        """Settle a waiting group as dropped."""
        self._ledger.record_dropped(number, reason)
        self._dropped_since_step[reason] = self._dropped_since_step.get(reason, 0) + 1
        self._scored.remove(number)
        self._judged.pop(number, None)

    def choose(self, *, policy_version: int, started: Mapping[int, int]) -> Batch:
        """Return the groups of the step to be made on ``policy_version``; they stay waiting until ``take``."""
        limit, wanted = self._config.max_staleness, self._config.groups_per_step
        for waiting in self._scored.oldest_first():
            age = staleness(policy_version=policy_version, oldest_policy_version=waiting.oldest_policy_version)
            if age > limit:
                self.drop(waiting.number, STALE)
        candidates = self._scored.oldest_first()
        if len(candidates) < wanted:
            return Batch((), f"scored groups: {len(candidates)} of the {wanted} of a step are here{self._drops()}")
        chosen, left_out = candidates[:wanted], candidates[wanted:]
        here = self._scored.numbers()
        unfinished = stragglers(
            left_out={waiting.number: waiting.oldest_policy_version for waiting in left_out},
            unfinished={
                number: version
                for number, version in started.items()
                if number not in here and not self._ledger.is_settled(number)
            },
            policy_version=policy_version,
            max_staleness=limit,
            groups_per_step=wanted,
        )
        if unfinished:
            return Batch(
                (),
                f"{len(unfinished)} unfinished group(s), the oldest {group_id(unfinished[0])}: a step without them "
                f"would make groups staler than max_staleness={limit}",
            )
        return Batch(tuple(self._judged[waiting.number] for waiting in chosen))

    def _drops(self) -> str:
        """Say what was dropped since the last step: a run that only drops is waiting for its user."""
        if not self._dropped_since_step:
            return ""
        counts = ", ".join(f"{count} {reason}" for reason, count in self._dropped_since_step.items())
        why = f" (last failure: {self._last_failure})" if UNSCORABLE in self._dropped_since_step else ""
        return f"; groups dropped since the last step: {counts}{why}"

    def take(self, batch: Batch) -> None:
        """Settle the groups of a batch as trained."""
        for group in batch.groups:
            number = group.waiting.number
            self._ledger.record_trained(number)
            self._scored.remove(number)
            del self._judged[number]
        self._dropped_since_step.clear()


def first_failure(waiting: WaitingGroup) -> str:
    """Return what the first failed reward of a group said."""
    for rollout in waiting.group.rollouts:
        for reward in rollout.rewards:
            if reward.outcome not in {"scored", "not_applicable"}:
                return f"{reward.name}: {reward.outcome} {reward.detail}".strip()
    return "no reward function applies to it"
