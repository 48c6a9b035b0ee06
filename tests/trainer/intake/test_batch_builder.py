"""Which groups are in a step, and which are dropped before it, with the reason."""

import numpy as np
import pytest

from shared.run_options.run_config import RunConfig
from tests.groups import scored_group
from tests.trainer.intake.batch_rig import Rig, failed, lost, truncated

pytestmark = pytest.mark.unit


def test_a_group_with_one_scored_completion_is_dropped_and_the_failure_is_told(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=2)
    rig.arrive(0, failed(scored_group(rewards=(0.0, 1.0)), 1))
    assert rig.ledger.dropped_by_reason() == {"unscorable": 1}
    batch = rig.batch()
    assert "1 unscorable (last failure: exact: timeout took longer than 1 s)" in batch.waiting_for


def test_a_group_with_fewer_scored_completions_than_the_run_asks_for_is_dropped(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1, min_scored_completions=3)
    rig.arrive(0, failed(scored_group(rewards=(0.0, 1.0, 1.0)), 2))
    assert rig.ledger.dropped_by_reason() == {"unscorable": 1}
    rig.arrive(1, failed(scored_group("00000001", rewards=(0.0, 1.0, 1.0, 0.0)), 3))
    assert rig.choose() == [1]


def test_the_failures_of_functions_are_counted_once_per_group(run_config: RunConfig) -> None:
    rig = Rig(run_config, reward_failure_window=2, reward_failure_threshold=0.4)
    rig.arrive(0, failed(scored_group(rewards=(0.0, 1.0)), 1))
    rig.arrive(1, failed(scored_group("00000001", rewards=(0.0, 1.0)), 0))
    verdict = rig.batches.failures.verdict()
    assert verdict is not None
    assert (verdict.reward_func, verdict.failed_ratio) == ("exact", 0.5)


def test_lost_rollouts_are_unscored_and_a_group_without_any_other_is_dropped(
    run_config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(run_config, groups_per_step=1, reward_failure_window=2)
    rig.arrive(0, lost(scored_group(rewards=(0.0, 0.0, 1.0)), 1))
    rig.arrive(1, lost(scored_group("00000001", rewards=(0.0, 1.0)), 0, 1))
    assert rig.ledger.dropped_by_reason() == {"unscorable": 1}
    (trained,) = rig.trained()
    assert np.isnan(trained.rewards_G).tolist() == [False, True, False]
    assert trained.advantages_G.tolist() == pytest.approx([-(0.5**0.5), 0.0, 0.5**0.5], rel=1e-3)
    assert "group 00000000 has lost rollouts: 1 x a tool hung" in caplog.text
    assert "group 00000001 has lost rollouts: 2 x a tool hung" in caplog.text
    assert rig.batches.failures.last_failure() == "a tool hung"


def test_a_group_of_which_masking_leaves_nothing_is_counted_in_a_batch_as_trl_counts_it(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=2, mask_truncated_completions=True)
    rig.arrive(0, truncated(scored_group(rewards=(0.0, 1.0)), 0, 1))
    rig.arrive(1, scored_group("00000001", rewards=(0.0, 1.0)))
    assert rig.choose() == [0, 1]
    assert rig.ledger.num_dropped == 0


def test_such_a_group_is_dropped_where_groups_without_signal_are_and_gives_its_place_back(
    run_config: RunConfig,
) -> None:
    rig = Rig(run_config, groups_per_step=1, mask_truncated_completions=True, drop_zero_std_groups=True)
    in_flight = rig.ledger.num_in_flight
    rig.arrive(0, truncated(scored_group(rewards=(0.0, 1.0)), 0, 1))
    rig.arrive(1, failed(truncated(scored_group("00000001", rewards=(0.0, 1.0, 0.0)), 0, 1), 2))
    rig.arrive(2, truncated(scored_group("00000002", rewards=(0.0, 1.0)), 0))
    assert rig.ledger.dropped_by_reason() == {"truncated": 2}
    assert rig.ledger.num_in_flight == in_flight - 2
    assert rig.choose() == [2]


def test_a_step_does_not_wait_for_a_settled_group(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1, max_staleness=1)
    rig.ledger.record_trained(3)
    rig.arrive(5, scored_group("00000005", policy_version=4))
    assert rig.choose(policy_version=4, started={3: 3}) == [5]


def test_a_batch_has_as_many_groups_as_its_minibatches_and_fewer_where_the_run_ends(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1, steps_per_generation=3, max_staleness=5)
    for number in range(3):
        rig.arrive(number, scored_group(f"{number:08d}"))
    assert rig.choose() == [0, 1, 2]
    assert rig.choose(num_steps_left=2) == [0, 1]


def test_a_group_too_stale_for_the_last_step_of_a_batch_is_dropped_before_its_first(run_config: RunConfig) -> None:
    """A batch of 2 steps begun at version 6 trains its last at version 7, 3 after version 4 and 4 after version 3."""
    rig = Rig(run_config, groups_per_step=1, num_iterations=2, max_staleness=3)
    rig.arrive(0, scored_group(policy_version=3))
    rig.arrive(1, scored_group("00000001", policy_version=4))
    assert rig.choose(policy_version=6) == [1]
    assert rig.ledger.dropped_by_reason() == {"stale": 1}


def test_advantages_over_the_batch_use_only_the_chosen_groups(run_config: RunConfig) -> None:
    """Rewards 0, 2 and 0, 6 have a std of sqrt(8). The rewards of a third group, which is left out, do not count."""
    rig = Rig(run_config, groups_per_step=2, scale_rewards="batch")
    for number, high in enumerate((2.0, 6.0, 100.0)):
        rig.arrive(number, scored_group(f"{number:08d}", rewards=(0.0, high)))
    first, second = rig.trained()
    std = 8**0.5 + 1e-4
    assert first.advantages_G.tolist() == pytest.approx([-1 / std, 1 / std])
    assert second.advantages_G.tolist() == pytest.approx([-3 / std, 3 / std])
