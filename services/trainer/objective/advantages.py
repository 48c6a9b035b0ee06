"""Turns what the reward functions said into one advantage a completion.

    outcomes of G completions --combined_rewards--> rewards_G --group_advantages--+--> advantages_G
                                (NaN = unscored)                                  |
    outcomes of all groups of a batch ------------------------batch_advantages----+

A failed reward function is never a zero: its completion is unscored, and is left out of every mean and std here, and of
the loss by whoever builds the training rows. A group that teaches nothing (equal rewards) has no advantages: None.
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
"""For each completion of a group, one outcome a reward function."""
Scaling = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]

STD_EPSILON = 1e-4
"""Added to the std before dividing by it, as TRL's GRPOTrainer does."""


def combined_rewards(rewards: GroupOutcomes) -> Rewards:
    """Return one reward for each completion: the weighted sum of what its reward functions said.

    A function that does not apply is left out of the sum. A completion for which a function failed, or to which none
    applies, or whose sum is beyond all numbers, is unscored: NaN.
    """
    values_GF, weights_GF = _values_and_weights(rewards)
    with np.errstate(over="ignore", invalid="ignore"):
        rewards_G: Rewards = np.nansum(values_GF * weights_GF, axis=1)
    rewards_G[np.isnan(values_GF).all(axis=1) | ~np.isfinite(rewards_G)] = np.nan
    return rewards_G


def is_scorable(rewards_G: Rewards, *, min_scored: int = 2) -> bool:
    """Whether enough completions are scored; two are the least of which one can be told from another."""
    return int(np.isfinite(rewards_G).sum()) >= min_scored


def teaches(rewards: GroupOutcomes, *, aggregation: Aggregation) -> bool:
    """Whether the completions of the group can be told apart: by their sums, or by any one function if that counts."""
    if aggregation == "sum_then_normalize":
        return not _all_equal(combined_rewards(rewards))
    values_GF, _ = _values_and_weights(rewards)
    return not all(_all_equal(values_GF[:, f]) for f in range(values_GF.shape[1]))


def group_advantages(rewards_G: Rewards, *, scale: Literal["group", "none"]) -> Rewards | None:
    """Return ``(r - mean) / (std + 1e-4)`` over the scored of one group, or None if the group teaches nothing.

    Equality is tested on the rewards: in float32 seven rewards of 0.1 have a std of 7e-9, and dividing by it invents an
    advantage of 1. The std has Bessel's correction, as torch's has.

    Args:
        rewards_G: Rewards of one group; NaN is unscored, gets advantage 0, and must be left out of the loss.
        scale: ``"none"`` leaves the division out (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Returns:
        None if all scored rewards are equal, or fewer than two are scored (tell them apart with `is_scorable`).
    """
    return _advantages(rewards_G, std=_std(rewards_G) if scale == "group" else None)


def batch_advantages(
    rewards_by_group: Sequence[GroupOutcomes], *, scale_rewards: Scaling, aggregation: Aggregation
) -> list[Rewards | None]:
    """Return the advantages of each group of a batch; None for a group that teaches nothing.

    ``scale_rewards="batch"`` divides by the std over all scored rewards of the batch, those of equal groups included
    (Lite PPO, arXiv 2508.08221): std estimates of small groups are noise. ``"normalize_then_sum"`` is GDPO (arXiv
    2601.05242): each function's rewards are normalised within the group, summed with their weights, and the sums
    normalised over the batch, so that a function with small rewards is heard too; ``scale_rewards`` is not read then.
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
    """Return, for each completion, the weighted sum of its rewards after each function's were normalised.

    A function that spoke of fewer than two completions of the group compares nothing, and adds nothing.
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
    """Return values_GF, NaN where there is none, and weights_GF. A failed function unscores its whole completion."""
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
    """Whether the scored of these are all the same, or fewer than two."""
    scored = rewards_G[np.isfinite(rewards_G)]
    return scored.size < 2 or bool((scored == scored[0]).all())


def _std(rewards_N: Rewards) -> float:
    """Return the std of the scored, with Bessel's correction; 0 for fewer than two."""
    scored = rewards_N[np.isfinite(rewards_N)]
    return float(scored.std(ddof=1)) if scored.size >= 2 else 0.0
