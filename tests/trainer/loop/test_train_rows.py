"""How a batch is divided into minibatches, and the divisor of each loss."""

from typing import Any

import msgspec
import numpy as np
import pytest

from services.trainer.groups.waiting_group import WaitingGroup
from services.trainer.loop.train_rows import make_minibatch, minibatches, step_totals, with_logprobs
from services.trainer.objective.loss import StepTotals
from services.trainer.telemetry.step_metrics import TrainedGroup
from shared.messages import ScoredGroup
from shared.run_options.run_config import RunConfig
from tests.groups import rollout, row, scored_group, with_row


def trained(number: int, *, lengths: tuple[int, ...] = (2, 2), rewards: tuple[float, ...] = (0.0, 1.0)) -> TrainedGroup:
    """Return a group whose completions have these lengths. A reward of NaN means that the function failed."""
    label = f"{number:08d}"
    group: ScoredGroup = msgspec.structs.replace(
        scored_group(label, rewards=[0.0] * len(lengths)),
        rollouts=tuple(
            rollout(label, branch, completion_ids=[8] * length, reward=0.0) for branch, length in enumerate(lengths)
        ),
    )
    rewards_G = np.array(rewards)
    advantages_G = np.nan_to_num(rewards_G - float(np.nanmean(rewards_G)))
    return TrainedGroup(WaitingGroup(number, group, 0), rewards_G, advantages_G, has_signal=True)


def truncated(group: TrainedGroup, branch: int) -> TrainedGroup:
    rollouts = list(group.waiting.group.rollouts)
    turn = msgspec.structs.replace(rollouts[branch].rows[-1].turns[-1], finish_reason="length")
    rollouts[branch] = with_row(rollouts[branch], turns=(turn,))
    message = msgspec.structs.replace(group.waiting.group, rollouts=tuple(rollouts))
    waiting = WaitingGroup(group.waiting.number, message, 0)
    return TrainedGroup(waiting, *group_numbers(group))


def config(run_config: RunConfig, **settings: Any) -> RunConfig:
    return run_config.model_copy(update={"groups_per_step": 2, "steps_per_generation": 3} | settings)


def numbers(groups: list[TrainedGroup], settings: RunConfig, *, policy_version: int) -> list[list[int]]:
    cut = minibatches(groups, settings, count=len(groups) // 2, policy_version=policy_version)
    return [[group.waiting.number for group in minibatch.groups] for minibatch in cut]


def test_minibatches_are_whole_groups_in_an_order_that_seed_and_version_decide(run_config: RunConfig) -> None:
    groups, settings = [trained(number) for number in range(6)], config(run_config)
    first = numbers(groups, settings, policy_version=6)
    assert [len(minibatch) for minibatch in first] == [2, 2, 2]
    assert sorted(number for minibatch in first for number in minibatch) == [0, 1, 2, 3, 4, 5]
    assert numbers(groups, settings, policy_version=6) == first, "the same after a crash"
    others = [numbers(groups, settings, policy_version=version) for version in range(9, 30, 3)]
    others += [numbers(groups, config(run_config, seed=seed), policy_version=6) for seed in range(7)]
    assert any(other != first for other in others[:7])
    assert any(other != first for other in others[7:])


def test_a_batch_of_one_minibatch_keeps_its_order(run_config: RunConfig) -> None:
    assert numbers([trained(5), trained(3)], config(run_config), policy_version=6) == [[5, 3]]


def test_a_batch_that_does_not_divide_into_minibatches_is_a_bug(run_config: RunConfig) -> None:
    with pytest.raises(AssertionError, match="5 groups do not make 3 minibatches of 2"):
        minibatches([trained(number) for number in range(5)], config(run_config), count=3, policy_version=0)


def test_failed_completions_make_no_rows_and_truncated_ones_only_if_so_configured(run_config: RunConfig) -> None:
    group = truncated(trained(0, lengths=(1, 2, 3, 4), rewards=(0.0, float("nan"), 1.0, 1.0)), 2)
    kept = make_minibatch([group], config(run_config))
    assert [row.num_sampled for row in kept.rows] == [1, 3, 4]
    assert (kept.num_masked_rollouts, kept.num_tokens) == (0, 8)
    masked = make_minibatch([group], config(run_config, mask_truncated_completions=True))
    assert [row.num_sampled for row in masked.rows] == [1, 4]
    assert [found.branch for found, _ in masked.origins] == [0, 3], "the rollout of each row"
    assert (masked.num_masked_rollouts, masked.num_tokens) == (1, 5)


def forked(group: TrainedGroup, branch: int) -> TrainedGroup:
    """Return the group with one completion of two rows: one sampled token, then three and the end of the context."""
    rollouts = list(group.waiting.group.rollouts)
    rows = (row((5, 6, 7, 8), (0, 0, 0, 1)), row((5, 6, 7, 8, 3, 9, 9, 9), (0, 0, 0, 0, 0, 1, 1, 1), 1))
    rollouts[branch] = msgspec.structs.replace(rollouts[branch], rows=rows)
    message = msgspec.structs.replace(group.waiting.group, rollouts=tuple(rollouts))
    return TrainedGroup(WaitingGroup(group.waiting.number, message, 0), *group_numbers(group))


def group_numbers(group: TrainedGroup) -> tuple[Any, Any, bool]:
    return group.rewards_G, group.advantages_G, group.has_signal


def test_every_row_of_a_rollout_is_trained_with_its_advantage_and_its_share_of_the_tokens(
    run_config: RunConfig,
) -> None:
    minibatch = make_minibatch([forked(trained(0), 1)], config(run_config))
    assert [(row.advantage, row.share, row.num_sampled) for row in minibatch.rows] == [
        (-0.5, 1.0, 2),
        (0.5, 0.25, 1),
        (0.5, 0.75, 3),
    ]
    assert [row.token_ids.size for row in minibatch.rows] == [5, 4, 8]
    (_, first), (forked_rollout, second), (again, third) = minibatch.origins
    assert forked_rollout is again
    assert (first.num_sampled, second, third) == (2, *forked_rollout.rows)
    assert (minibatch.num_rollouts, minibatch.num_tokens) == (2, 6)
    assert step_totals([minibatch]) == [
        StepTotals(num_rollouts=2, num_tokens=6.0, num_step_tokens=6, num_pass_tokens=17)
    ]


def test_a_truncated_rollout_is_masked_with_all_of_its_rows(run_config: RunConfig) -> None:
    settings = config(run_config, mask_truncated_completions=True)
    whole = forked(trained(0), 1)
    first, second = whole.waiting.group.rollouts
    cut = msgspec.structs.replace(
        second, rows=(second.rows[0], row((5, 6, 7, 8), (0, 0, 0, 1), finish_reason="length"))
    )
    message = msgspec.structs.replace(whole.waiting.group, rollouts=(first, cut))
    masked = TrainedGroup(WaitingGroup(0, message, 0), *group_numbers(whole))
    minibatch = make_minibatch([masked], settings)
    assert [row.num_sampled for row in minibatch.rows] == [2]
    assert step_totals([minibatch])[0].num_rollouts == 2
    assert len(make_minibatch([whole], settings).rows) == 3, "the end of its last row is whole"


def test_a_lost_rollout_is_not_trained_and_counts_in_no_divisor(run_config: RunConfig) -> None:
    group = trained(0, lengths=(1, 2, 3), rewards=(0.0, float("nan"), 1.0))
    first, second, third = group.waiting.group.rollouts
    lost = msgspec.structs.replace(second, lost="a tool hung")  # with the turns before the call
    message = msgspec.structs.replace(group.waiting.group, rollouts=(first, lost, third))
    minibatch = make_minibatch([TrainedGroup(WaitingGroup(0, message, 0), *group_numbers(group))], config(run_config))
    assert [row.num_sampled for row in minibatch.rows] == [1, 3]
    assert step_totals([minibatch])[0].num_rollouts == 2


def test_a_step_is_divided_by_its_own_rows_and_by_the_mean_tokens_of_a_step_of_the_batch(
    run_config: RunConfig,
) -> None:
    """Two minibatches of 3 and 9 tokens: 6 per step. The truncated row counts as a row, but its 2 tokens do not count.

    The model also processes 3 tokens of prompt.
    """
    settings = config(run_config, mask_truncated_completions=True)
    few = make_minibatch([truncated(trained(0, lengths=(3, 2)), 1)], settings)
    many = make_minibatch([trained(1, lengths=(4, 5))], settings)
    assert step_totals([few, many]) == [
        StepTotals(num_rollouts=2, num_tokens=6.0, num_step_tokens=3, num_pass_tokens=6),
        StepTotals(num_rollouts=2, num_tokens=6.0, num_step_tokens=9, num_pass_tokens=15),
    ]


def test_logprobs_of_other_policies_are_put_beside_each_row(run_config: RunConfig) -> None:
    minibatch = make_minibatch([trained(0, lengths=(1, 2))], config(run_config))
    old = [np.array([-1.0], dtype=np.float32), np.array([-2.0, -3.0], dtype=np.float32)]
    first, second = with_logprobs(minibatch, old_logprobs=old, reference_logprobs=None).rows
    assert first.old_logprobs is old[0]
    assert second.old_logprobs is old[1]
    assert first.reference_logprobs is None
    assert all(row.old_logprobs is None for row in minibatch.rows)
