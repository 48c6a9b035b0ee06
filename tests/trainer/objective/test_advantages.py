"""Advantages, with numbers computed by hand."""

import math

import numpy as np
import pytest

from services.trainer.objective.advantages import (
    Aggregation,
    Scaling,
    batch_advantages,
    combined_rewards,
    group_advantages,
    is_scorable,
    teaches,
)
from shared.messages import Outcome, RewardOutcome

pytestmark = pytest.mark.unit


def scored(value: float, *, weight: float = 1.0) -> RewardOutcome:
    return RewardOutcome(name="f", outcome="scored", value=value, weight=weight)


def unscored(outcome: Outcome) -> RewardOutcome:
    return RewardOutcome(name="f", outcome=outcome, value=None, weight=1.0)


def test_a_reward_is_the_weighted_sum_of_what_the_functions_said() -> None:
    rewards_G = combined_rewards([[scored(1.0, weight=2.0), scored(0.5, weight=-1.0)], [scored(3.0), scored(0.0)]])
    assert rewards_G.dtype == np.float64
    assert rewards_G.tolist() == [1.5, 3.0]


def test_a_function_that_does_not_apply_is_left_out_of_the_sum() -> None:
    assert combined_rewards([[scored(0.25), unscored("not_applicable")]]).tolist() == [0.25]


def test_a_completion_to_which_no_function_applies_is_unscored() -> None:
    assert np.isnan(combined_rewards([[unscored("not_applicable"), unscored("not_applicable")]])).all()


@pytest.mark.parametrize("outcome", ["timeout", "invalid", "overload", "error"])
def test_a_failed_function_makes_its_completion_unscored_and_not_zero(outcome: Outcome) -> None:
    rewards_G = combined_rewards([[scored(1.0), unscored(outcome)], [scored(1.0), scored(0.0)]])
    assert math.isnan(rewards_G[0])
    assert rewards_G[1] == 1.0


def test_an_infinite_sum_is_unscored_and_does_not_affect_the_others() -> None:
    too_large, opposites = [scored(1e308, weight=10.0)], [scored(1e308, weight=10.0), scored(1e308, weight=-10.0)]
    rewards_G = combined_rewards([[*too_large, scored(0.0)], opposites, [scored(1.0), scored(0.0)]])
    assert np.isnan(rewards_G).tolist() == [True, True, False]
    advantages_G = group_advantages(combined_rewards([too_large, [scored(1.0)], [scored(0.0)]]), scale="none")
    assert advantages_G is not None
    assert advantages_G.tolist() == [0.0, 0.5, -0.5]


def test_advantages_are_deviations_from_the_mean_over_the_std_with_bessels_correction() -> None:
    # mean 0.25, squared deviations 3/16 * ... sum to 0.75, over 3 is 0.25: the std is 0.5
    advantages_G = group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), scale="group")
    assert advantages_G is not None
    assert advantages_G.tolist() == pytest.approx([0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001])


def test_advantages_without_scaling_are_deviations_from_the_mean() -> None:
    advantages_G = group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), scale="none")
    assert advantages_G is not None
    assert advantages_G.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_an_unscored_completion_is_left_out_of_mean_and_std_and_gets_advantage_zero() -> None:
    # Over 2 and 4 only: mean 3, std sqrt(2). If the unscored one counted as zero, the mean would be 2.
    advantages_G = group_advantages(np.array([2.0, np.nan, 4.0]), scale="group")
    assert advantages_G is not None
    assert advantages_G.tolist() == pytest.approx([-1 / (math.sqrt(2) + 1e-4), 0.0, 1 / (math.sqrt(2) + 1e-4)])


def test_equal_rewards_teach_nothing_even_where_rounding_gives_them_a_std() -> None:
    rewards_G = np.array([0.1] * 7)
    assert rewards_G.std(ddof=1) > 0  # so equality is not tested on the std
    assert group_advantages(rewards_G, scale="group") is None
    assert is_scorable(rewards_G)


def test_only_scored_rewards_are_compared_for_equality() -> None:
    assert group_advantages(np.array([1.0, np.nan, 1.0]), scale="group") is None


@pytest.mark.parametrize("rewards", [[np.nan, np.nan, np.nan], [np.nan, 1.0, np.nan]])
def test_fewer_than_two_scored_completions_are_not_scorable(rewards: list[float]) -> None:
    assert not is_scorable(np.array(rewards))
    assert group_advantages(np.array(rewards), scale="group") is None


def test_two_scored_completions_are_scorable() -> None:
    assert is_scorable(np.array([0.0, np.nan, 1.0]))


def group(*rewards: float | None) -> list[list[RewardOutcome]]:
    """Return a group scored by one function; None is a failure."""
    return [[unscored("error") if reward is None else scored(reward)] for reward in rewards]


def advantages_of(
    groups: list[list[list[RewardOutcome]]],
    *,
    scale: Scaling = "group",
    aggregation: Aggregation = "sum_then_normalize",
) -> list[list[float] | None]:
    result = batch_advantages(groups, scale_rewards=scale, aggregation=aggregation)
    return [None if advantages_G is None else advantages_G.tolist() for advantages_G in result]


def test_within_groups_a_batch_is_scaled_group_by_group() -> None:
    groups = [group(1.0, 0.0), group(3.0, 3.0), group(8.0, 0.0)]
    std = math.sqrt(0.5)  # the std of 1 and 0; that of 8 and 0 is 8 times as large
    near, far = 0.5 / (std + 1e-4), 4.0 / (8 * std + 1e-4)
    assert advantages_of(groups) == [pytest.approx([near, -near]), None, pytest.approx([far, -far])]
    assert advantages_of(groups, scale="none") == [[0.5, -0.5], None, [4.0, -4.0]]


def test_over_the_batch_one_std_scales_all_groups_equal_ones_included_and_failures_not() -> None:
    # The scored ones are 1, 0, 3, 3, 8: mean 3, squares 4 + 9 + 0 + 0 + 25 = 38, over 4.
    std = math.sqrt(38 / 4) + 1e-4
    groups = [group(1.0, 0.0), group(3.0, 3.0), group(8.0, None)]
    assert advantages_of(groups, scale="batch") == [pytest.approx([0.5 / std, -0.5 / std]), None, None]


def test_an_unscored_completion_has_advantage_zero_under_every_scaling() -> None:
    for scale in ("group", "batch", "none"):
        (advantages_G,) = advantages_of([group(1.0, None, 0.0)], scale=scale)
        assert advantages_G is not None
        assert advantages_G[1] == 0.0
        assert advantages_G[0] == -advantages_G[2] > 0


def test_normalised_first_a_function_of_small_rewards_counts_as_much_as_one_of_large_ones() -> None:
    # Each function is +-1/sqrt(2) after its own normalisation (2 completions); they agree in group 0, not in group 1.
    small, large = 0.01, 100.0
    agree = [[scored(small), scored(large)], [scored(0.0), scored(0.0)]]
    disagree = [[scored(small), scored(0.0)], [scored(0.0), scored(large)]]
    first, second = advantages_of([agree, disagree], aggregation="normalize_then_sum")
    of_small = (small / 2) / (small / math.sqrt(2) + 1e-4)
    of_large = (large / 2) / (large / math.sqrt(2) + 1e-4)
    sums = [of_small + of_large, of_small - of_large]
    std = math.sqrt(2 * (sums[0] ** 2 + sums[1] ** 2) / 3) + 1e-4
    assert first == pytest.approx([sums[0] / std, -sums[0] / std])
    assert second == pytest.approx([sums[1] / std, -sums[1] / std])


def test_normalised_first_weights_apply_to_what_was_normalised() -> None:
    one = [[scored(1.0, weight=2.0), scored(0.0, weight=-3.0)], [scored(0.0, weight=2.0), scored(5.0, weight=-3.0)]]
    (advantages_G,) = advantages_of([one], aggregation="normalize_then_sum")
    of_first = 0.5 / (math.sqrt(0.5) + 1e-4)
    of_second = -2.5 / (5 * math.sqrt(0.5) + 1e-4)
    total = 2 * of_first - 3 * of_second
    assert advantages_G == pytest.approx(
        [total / (total * math.sqrt(2) + 1e-4), -total / (total * math.sqrt(2) + 1e-4)]
    )


def test_normalised_first_a_function_that_spoke_once_adds_nothing_and_a_failure_leaves_all_means() -> None:
    rows = [
        [scored(1.0), scored(7.0)],
        [scored(0.0), unscored("not_applicable")],
        [scored(100.0), unscored("timeout")],
    ]
    (advantages_G,) = advantages_of([rows], aggregation="normalize_then_sum")
    only_first = 0.5 / (math.sqrt(0.5) + 1e-4)
    scaled = only_first / (only_first * math.sqrt(2) + 1e-4)
    assert advantages_G == pytest.approx([scaled, -scaled, 0.0])


def test_a_group_teaches_if_its_sums_differ_or_any_function_where_that_counts() -> None:
    cancelling = [[scored(1.0), scored(0.0)], [scored(0.0), scored(1.0)]]
    assert not teaches(cancelling, aggregation="sum_then_normalize")
    assert teaches(cancelling, aggregation="normalize_then_sum")
    assert advantages_of([cancelling]) == [None]
    equal = [[scored(1.0), scored(0.5)], [scored(1.0), scored(0.5)]]
    assert not teaches(equal, aggregation="normalize_then_sum")
    assert advantages_of([equal], aggregation="normalize_then_sum") == [None]
    assert teaches(group(1.0, 0.0, None), aggregation="sum_then_normalize")


def test_a_batch_without_groups_has_no_advantages() -> None:
    for scale in ("group", "batch", "none"):
        assert advantages_of([], scale=scale) == []
    assert advantages_of([], aggregation="normalize_then_sum") == []
