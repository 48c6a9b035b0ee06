"""Cuts a batch into minibatches of whole groups, and turns them into the rows that the core trains on.

    groups of the batch --shuffle, cut--> minibatch, minibatch, ...     one optimizer step each, in this order
                                              |
                                              the rows of scored rollouts; truncated ones are left out if configured

The order is drawn from the run's seed and the policy version at which the batch begins. Every pass over the batch, and
every repetition after a crash, uses the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.trainer.objective.loss import StepTotals
from services.trainer.policy.microbatches import TrainRow
from services.trainer.telemetry.step_metrics import TrainedGroup
from shared.arrays import Logprobs, unpack_ids, unpack_mask
from shared.messages import Rollout, Row
from shared.run_options.run_config import RunConfig


@dataclass(frozen=True, eq=False)
class Minibatch:
    """The groups and rows of one optimizer step."""

    groups: tuple[TrainedGroup, ...]
    rows: tuple[TrainRow, ...]
    origins: tuple[tuple[Rollout, Row], ...]
    """The rollout of each row, and the row as it arrived."""
    num_masked_rollouts: int
    """Number of truncated rollouts that ``mask_truncated_completions`` kept out of the rows."""

    @property
    def num_rollouts(self) -> int:
        """Number of rollouts in the loss."""
        return len({rollout.rollout_id for rollout, _ in self.origins})

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens in the loss."""
        return sum(row.num_sampled for row in self.rows)


def minibatches(
    groups: Sequence[TrainedGroup], config: RunConfig, *, count: int, policy_version: int
) -> list[Minibatch]:
    """Return the minibatches of the batch that begins at ``policy_version``, each of ``groups_per_step`` groups."""
    order = list(range(len(groups)))
    if count > 1:
        rng = np.random.Generator(np.random.PCG64([config.seed, policy_version]))
        order = rng.permutation(len(groups)).tolist()
    size = config.groups_per_step
    if len(groups) != count * size:
        raise AssertionError(f"{len(groups)} groups do not make {count} minibatches of {size}")
    return [
        make_minibatch([groups[place] for place in order[start : start + size]], config)
        for start in range(0, len(order), size)
    ]


def make_minibatch(groups: Sequence[TrainedGroup], config: RunConfig) -> Minibatch:
    """Return a minibatch of these groups, with the training rows of their scored rollouts in order."""
    rows: list[TrainRow] = []
    origins: list[tuple[Rollout, Row]] = []
    num_masked = 0
    for group in groups:
        for rollout, reward, advantage in zip(
            group.waiting.group.rollouts, group.rewards_G.tolist(), group.advantages_G.tolist(), strict=True
        ):
            if np.isnan(reward):
                continue
            if config.mask_truncated_completions and rollout.is_truncated():
                num_masked += 1
                continue
            for row in rollout.rows:
                origins.append((rollout, row))
                rows.append(
                    TrainRow(
                        token_ids=unpack_ids(row.token_ids),
                        loss_mask=unpack_mask(row.loss_mask),
                        generator_logprobs=row.generator_logprobs(),
                        advantage=advantage,
                        share=row.num_sampled / rollout.num_sampled,
                    )
                )
    return Minibatch(tuple(groups), tuple(rows), tuple(origins), num_masked)


def step_totals(batch: Sequence[Minibatch]) -> list[StepTotals]:
    """Return the divisors of each minibatch's loss.

    As in TRL, dapo, cispo and vespo divide by the batch's mean number of tokens per step. Means over rollouts also
    count the truncated rollouts that were kept out.
    """
    tokens_per_step = sum(minibatch.num_tokens for minibatch in batch) / len(batch)
    return [
        StepTotals(
            num_rollouts=minibatch.num_rollouts + minibatch.num_masked_rollouts,
            num_tokens=tokens_per_step,
            num_step_tokens=minibatch.num_tokens,
            num_pass_tokens=sum(row.token_ids.size for row in minibatch.rows),
        )
        for minibatch in batch
    ]


def with_logprobs(
    minibatch: Minibatch,
    *,
    old_logprobs: Sequence[Logprobs] | None,
    reference_logprobs: Sequence[Logprobs] | None,
) -> Minibatch:
    """Return the minibatch with each row's logprobs under the old and the reference policy, if given."""
    rows = minibatch.rows
    if old_logprobs is not None:
        rows = tuple(replace(row, old_logprobs=found) for row, found in zip(rows, old_logprobs, strict=True))
    if reference_logprobs is not None:
        rows = tuple(
            replace(row, reference_logprobs=found) for row, found in zip(rows, reference_logprobs, strict=True)
        )
    return replace(minibatch, rows=rows)
