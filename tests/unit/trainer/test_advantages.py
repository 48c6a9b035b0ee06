"""The numbers here were worked out by hand."""

import math

import numpy as np
import pytest

from services.trainer.advantages import combined_rewards, group_advantages, is_scorable
from shared.messages import Outcome, RewardOutcome


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
    # Over 2 and 4 alone: mean 3, std sqrt(2). With the unscored one as zero, the mean would be 2.
    advantages_G = group_advantages(np.array([2.0, np.nan, 4.0]), scale="group")
    assert advantages_G is not None
    assert advantages_G.tolist() == pytest.approx([-1 / (math.sqrt(2) + 1e-4), 0.0, 1 / (math.sqrt(2) + 1e-4)])


def test_equal_rewards_teach_nothing_even_where_rounding_gives_them_a_std() -> None:
    rewards_G = np.array([0.1] * 7)
    assert rewards_G.std(ddof=1) > 0  # which is why equality is not tested on the std
    assert group_advantages(rewards_G, scale="group") is None
    assert is_scorable(rewards_G)


def test_equality_is_among_the_scored_alone() -> None:
    assert group_advantages(np.array([1.0, np.nan, 1.0]), scale="group") is None


@pytest.mark.parametrize("rewards", [[np.nan, np.nan, np.nan], [np.nan, 1.0, np.nan]])
def test_fewer_than_two_scored_completions_are_not_scorable(rewards: list[float]) -> None:
    assert not is_scorable(np.array(rewards))
    assert group_advantages(np.array(rewards), scale="group") is None


def test_two_scored_completions_are_scorable() -> None:
    assert is_scorable(np.array([0.0, np.nan, 1.0]))
