"""Turns the outcomes of reward functions into one advantage per completion.

    outcomes of G completions --combined_rewards--> rewards_G --group_advantages--+--> advantages_G
                                (NaN = unscored)                                  |
    outcomes of all groups of a batch ------------------------batch_advantages----+

A failed reward function never counts as a reward of zero. Its completion is unscored: it is left out of every mean and
std here, and the code that builds the training rows leaves it out of the loss. A group that teaches nothing, because
its rewards are equal, has no advantages: None.
Group-relative advantages: DeepSeekMath, arXiv 2402.03300, section 4.1.2.

    G  completions in a group       F  reward functions
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from shared.messages import RewardOutcome, is_failure

Rewards = npt.NDArray[np.float64]
GroupOutcomes = Sequence[Sequence[RewardOutcome]]
"""One list per completion of a group, with one outcome per reward function."""
Scaling = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]

STD_EPSILON = 1e-4
"""Added to the std before dividing by it, as TRL's GRPOTrainer does."""


def combined_rewards(rewards: GroupOutcomes) -> Rewards:
    """Return one reward per completion: the weighted sum of the values of its reward functions.

    A function that does not apply is left out of the sum. A completion is unscored (NaN) if a function failed on it, if
    no function applies to it, or if the sum is not finite.
    """
    values_GF, weights_GF = _values_and_weights(rewards)
    with np.errstate(over="ignore", invalid="ignore"):
        rewards_G: Rewards = np.nansum(values_GF * weights_GF, axis=1)
    rewards_G[np.isnan(values_GF).all(axis=1) | ~np.isfinite(rewards_G)] = np.nan
    return rewards_G


def is_scorable(rewards_G: Rewards, *, min_scored: int = 2) -> bool:
    """Whether at least ``min_scored`` completions have a reward. Two are needed for a comparison."""
    return int(np.isfinite(rewards_G).sum()) >= min_scored


def teaches(rewards: GroupOutcomes, *, aggregation: Aggregation) -> bool:
    """Whether rewards differ within a group: their weighted sums or, with normalize_then_sum, any function's values."""
    if aggregation == "sum_then_normalize":
        return not _all_equal(combined_rewards(rewards))
    values_GF, _ = _values_and_weights(rewards)
    return not all(_all_equal(values_GF[:, f]) for f in range(values_GF.shape[1]))


def group_advantages(rewards_G: Rewards, *, scale: Literal["group", "none"]) -> Rewards | None:
    """Return ``(r - mean) / (std + 1e-4)`` over the scored completions of one group, or None if it teaches nothing.

    Equality is tested on the rewards: in float32 seven rewards of 0.1 have a std of 7e-9, and dividing by it invents an
    advantage of 1. The std has Bessel's correction, as in torch.

    Args:
        rewards_G: Rewards of one group. An unscored completion (NaN) gets advantage 0; leave it out of the loss.
        scale: ``"none"`` omits the division (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Returns:
        None if all scored rewards are equal, or if fewer than two are scored. `is_scorable` tells these cases apart.
    """
    return _advantages(rewards_G, std=_std(rewards_G) if scale == "group" else None)


def batch_advantages(
    rewards_by_group: Sequence[GroupOutcomes], *, scale_rewards: Scaling, aggregation: Aggregation
) -> list[Rewards | None]:
    """Return the advantages of each group of a batch; None for a group that teaches nothing.

    ``scale_rewards="batch"`` divides by the std over all scored rewards of the batch, including groups of equal rewards
    (Lite PPO, arXiv 2508.08221), because std estimates of small groups are noisy. ``"normalize_then_sum"`` is GDPO
    (arXiv 2601.05242): it normalises each function's rewards within the group, sums them with their weights, normalises
    the sums over the batch, and ignores ``scale_rewards``. A function with small rewards then counts too.
    """
    if aggregation == "normalize_then_sum":
        sums_by_group = [_sum_of_normalised(rewards) for rewards in rewards_by_group]
        everything = np.concatenate([*sums_by_group, np.empty(0)])
        mean, std = (float(np.nanmean(everything)), _std(everything)) if is_scorable(everything) else (0.0, 0.0)
        return [
            np.nan_to_num((sums_G - mean) / (std + STD_EPSILON), nan=0.0)
            if is_scorable(sums_G) and teaches(rewards, aggregation=aggregation)
            else None
            for sums_G, rewards in zip(sums_by_group, rewards_by_group, strict=True)
        ]
    combined = [combined_rewards(rewards) for rewards in rewards_by_group]
    if scale_rewards == "batch":
        std = _std(np.concatenate([*combined, np.empty(0)]))
        return [_advantages(rewards_G, std=std) for rewards_G in combined]
    return [group_advantages(rewards_G, scale=scale_rewards) for rewards_G in combined]


def _advantages(rewards_G: Rewards, *, std: float | None) -> Rewards | None:
    if _all_equal(rewards_G):
        return None
    centred_G = rewards_G - np.nanmean(rewards_G)
    return np.nan_to_num(centred_G if std is None else centred_G / (std + STD_EPSILON), nan=0.0)


def _sum_of_normalised(rewards: GroupOutcomes) -> Rewards:
    """Return, for each completion, the weighted sum of its normalised rewards.

    A function that scored fewer than two completions of the group allows no comparison, and adds nothing.
    """
    values_GF, weights_GF = _values_and_weights(rewards)
    sums_G = np.zeros(values_GF.shape[0])
    for f in range(values_GF.shape[1]):
        values_G = values_GF[:, f]
        if is_scorable(values_G):
            normalised_G = (values_G - np.nanmean(values_G)) / (_std(values_G) + STD_EPSILON)
            sums_G += weights_GF[:, f] * np.nan_to_num(normalised_G, nan=0.0)
    sums_G[np.isnan(values_GF).all(axis=1)] = np.nan
    return sums_G


def _values_and_weights(rewards: GroupOutcomes) -> tuple[Rewards, Rewards]:
    """Return values_GF, NaN for no value, and weights_GF. A failed function makes its whole completion unscored."""
    values_GF = np.array(
        [
            [
                np.nan if outcome.value is None or any(is_failure(o.outcome) for o in outcomes) else outcome.value
                for outcome in outcomes
            ]
            for outcomes in rewards
        ],
        dtype=np.float64,
    )
    return values_GF, np.array([[outcome.weight for outcome in outcomes] for outcomes in rewards], dtype=np.float64)


def _all_equal(rewards_G: Rewards) -> bool:
    """Whether the scored rewards are all equal, or fewer than two."""
    scored = rewards_G[np.isfinite(rewards_G)]
    return scored.size < 2 or bool((scored == scored[0]).all())


def _std(rewards_N: Rewards) -> float:
    """Return the std of the scored rewards, with Bessel's correction; 0 for fewer than two."""
    scored = rewards_N[np.isfinite(rewards_N)]
    return float(scored.std(ddof=1)) if scored.size >= 2 else 0.0
