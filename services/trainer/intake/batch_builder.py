"""Chooses the groups of the next batch, and drops groups that no batch should train on.

    arrival --judge--> trainable          unscorable, truncated, zero_std, stale: dropped with that reason
    trainable --choose--> the groups of one batch, oldest tokens first --with_advantages--> groups to train

It chooses nothing while a batch would push an unfinished group past ``max_staleness`` (staleness.py explains why).
Among equally old groups, the group admitted first is taken, so the choice depends only on the set of candidates.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.trainer.groups.group_ids import group_id
from services.trainer.groups.ledger import Ledger
from services.trainer.groups.schedule import BatchShape
from services.trainer.groups.staleness import is_too_stale, stragglers
from services.trainer.groups.waiting_group import WaitingGroup
from services.trainer.intake.reward_failures import RewardFailures, first_failure
from services.trainer.intake.scored_groups import ScoredGroups
from services.trainer.objective.advantages import Rewards, batch_advantages, combined_rewards, is_scorable, teaches
from services.trainer.telemetry.group_traces import GroupTraces
from services.trainer.telemetry.step_metrics import TrainedGroup
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)

UNSCORABLE, ZERO_STD, STALE, TRUNCATED = "unscorable", "zero_std", "stale", "truncated"


@dataclass(frozen=True)
class Batch:
    """The groups of one batch; or an empty batch, with the reason why none can be formed yet."""

    groups: tuple[WaitingGroup, ...]
    waiting_for: str = ""


class BatchBuilder:
    """Chooses the batches of one run from its scored groups, and drops groups that cannot be trained.

    Args:
        config: The run's settings.
        scored: The scored groups that wait for a batch.
        ledger: Records every trained and every dropped group.
        traces: Records trained and dropped groups as OpenTelemetry traces.

    Attributes:
        failures: Recent failures of the reward functions.
    """

    def __init__(
        self, config: RunConfig, *, scored: ScoredGroups, ledger: Ledger, traces: GroupTraces | None = None
    ) -> None:
        self._config = config
        self._traces = traces or GroupTraces()
        self._shape = BatchShape.of(config)
        self._scored = scored
        self._ledger = ledger
        self._dropped_since_batch: dict[str, int] = {}
        self._last_failure = ""
        self.failures = RewardFailures(config)

    def judge(self, waiting: WaitingGroup) -> None:
        """Judge a waiting group by its rewards: keep it for ``choose``, or drop it with the reason."""
        rollouts = waiting.group.rollouts
        outcomes = [rollout.rewards for rollout in rollouts]
        rewards_G = combined_rewards(outcomes)
        min_scored = self._config.min_scored_completions
        has_enough = is_scorable(rewards_G, min_scored=min_scored)
        self.failures.note(waiting.number, outcomes, is_scorable=has_enough)
        if lost := Counter(rollout.lost for rollout in rollouts if rollout.lost):
            reasons = "; ".join(f"{count} x {reason}" for reason, count in lost.most_common())
            log.warning("group %s has lost rollouts: %s", group_id(waiting.number), reasons)
        if not has_enough:
            self._last_failure = first_failure(outcomes) or "no reward function applies to it"
            log.warning(
                "group %s has fewer than %d scored completions: %s",
                group_id(waiting.number), min_scored, self._last_failure, extra={"group_id": group_id(waiting.number)},
            )  # fmt: skip
            self.drop(waiting.number, UNSCORABLE)
            return
        # Without drop_zero_std_groups, a group whose completions are all masked stays in: TRL's divisors count them.
        if self._config.drop_zero_std_groups and (reason := self._why_no_signal(waiting, rewards_G)):
            self.drop(waiting.number, reason)

    def drop(self, number: int, reason: str) -> None:
        """Record in the ledger that a waiting group is dropped for this reason, and forget the group."""
        self._ledger.record_dropped(number, reason)
        self._dropped_since_batch[reason] = self._dropped_since_batch.get(reason, 0) + 1
        self._traces.dropped(self._scored.remove(number), reason)

    def choose(self, *, policy_version: int, started: Mapping[int, int], num_steps_left: int) -> Batch:
        """Drop groups that are too stale, and return the groups of the batch that begins at ``policy_version``.

        The groups stay here until ``take``. The batch is empty, with the reason, if it must wait.

        Args:
            policy_version: The policy version that the batch begins with.
            started: Groups that generators have begun to sample: number -> policy version at that time.
            num_steps_left: Remaining optimizer steps.
        """
        limit, shape = self._config.max_staleness, self._shape
        wanted = self._wanted(num_steps_left)
        for waiting in self._scored.oldest_first():
            if is_too_stale(
                oldest_policy_version=waiting.oldest_policy_version,
                policy_version=policy_version,
                max_staleness=limit,
                shape=shape,
            ):
                self.drop(waiting.number, STALE)
        candidates = self._scored.oldest_first()
        if len(candidates) < wanted:
            return Batch(
                (), f"scored groups: {len(candidates)} of the {wanted} for a batch have arrived{self._drops()}"
            )
        chosen, left_out = candidates[:wanted], candidates[wanted:]
        here = self._scored.considered()
        unfinished = stragglers(
            left_out={waiting.number: waiting.oldest_policy_version for waiting in left_out},
            unfinished={
                number: version
                for number, version in started.items()
                if number not in here and not self._ledger.is_settled(number)
            },
            policy_version=policy_version,
            max_staleness=limit,
            shape=shape,
        )
        if unfinished:
            return Batch(
                (),
                f"{len(unfinished)} unfinished group(s), the oldest {group_id(unfinished[0])}: a batch without them "
                f"would make groups staler than max_staleness={limit}",
            )
        return Batch(tuple(chosen))

    def num_missing(self, *, num_steps_left: int) -> int:
        """Return the least number of further groups needed before a batch can be chosen."""
        return max(0, self._wanted(num_steps_left) - len(self._scored.considered()))

    def _wanted(self, num_steps_left: int) -> int:
        return self._shape.minibatches(num_steps_left=num_steps_left) * self._shape.groups_per_step

    def take(self, batch: Batch, *, step: int) -> None:
        """Record the groups of a batch as trained. The weights contain them since optimizer step ``step``."""
        for waiting in batch.groups:
            self._ledger.record_trained(waiting.number)
            self._scored.remove(waiting.number)
        self._dropped_since_batch.clear()
        self._traces.trained(batch.groups, step=step)

    def _why_no_signal(self, waiting: WaitingGroup, rewards_G: Rewards) -> str:
        """Return the reason to drop a group that gives no gradient; empty if the group gives one."""
        rollouts = waiting.group.rollouts
        if self._config.mask_truncated_completions:
            is_left_out_G = np.isnan(rewards_G) | [rollout.is_truncated() for rollout in rollouts]
            if is_left_out_G.all():
                return TRUNCATED
        aggregation = self._config.multi_objective_aggregation
        return "" if teaches([rollout.rewards for rollout in rollouts], aggregation=aggregation) else ZERO_STD

    def _drops(self) -> str:
        """Return the drops since the last batch as text for the run's status; empty if there are none."""
        if not self._dropped_since_batch:
            return ""
        counts = ", ".join(f"{count} {reason}" for reason, count in self._dropped_since_batch.items())
        why = f" (last failure: {self._last_failure})" if UNSCORABLE in self._dropped_since_batch else ""
        return f"; groups dropped since the last batch: {counts}{why}"


def with_advantages(batch: Batch, config: RunConfig) -> tuple[TrainedGroup, ...]:
    """Return the groups of a batch, each completion with its reward and its advantage (objective/advantages.py)."""
    outcomes = [[rollout.rewards for rollout in waiting.group.rollouts] for waiting in batch.groups]
    advantages = batch_advantages(
        outcomes, scale_rewards=config.scale_rewards, aggregation=config.multi_objective_aggregation
    )
    return tuple(
        TrainedGroup(
            waiting=waiting,
            rewards_G=(rewards_G := combined_rewards(rewards)),
            advantages_G=np.zeros_like(rewards_G) if advantages_G is None else advantages_G,
            has_signal=advantages_G is not None,
        )
        for waiting, rewards, advantages_G in zip(batch.groups, outcomes, advantages, strict=True)
    )
