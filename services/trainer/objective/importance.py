"""Importance ratios between policies, and the weights and masks derived from them. Pure.

    pi_gen --sampled--> pi_old --a batch of steps--> pi          pi_gen: another engine, older weights
           <-- correction -->  <-- the loss's ratio -->          pi_old: this trainer at the batch's beginning

A completion sampled from pi_gen is corrected by the constant w = pi_old / pi_gen, and the loss clips pi around pi_old:
decoupled PPO (Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298).

`ratios` computes every ratio of probabilities in the loss, and bounds it.

    B  sequences in a microbatch       T  sampled tokens
"""

import math

import torch
from torch import Tensor

from services.trainer.objective.loss_settings import LossSettings

MAX_LOG_RATIO = 20.0
"""Ratios above e^20, 485 million, count as e^20: in float32 e^89 is infinite, and 0 times its gradient is NaN.

VESPO (arXiv 2602.10693) bounds each token in this way, and so does TRL's implementation of it.
"""


def ratios(log_ratio: Tensor) -> Tensor:
    """Return ``exp(min(log_ratio, 20))``. Beyond the bound the gradient is 0."""
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


def log_ratios(log_ratio_BT: Tensor, mask_BT: Tensor, *, is_sequence_level: bool) -> Tensor:
    """Return the log of each token's ratio (B, T), or of each completion's (B, 1).

    A completion's ratio is the geometric mean of its tokens' ratios (GSPO, arXiv 2507.18071, equation 7), so that it
    does not depend on the length. `correction_weights` instead uses the ratio of the completion's probabilities.
    """
    if not is_sequence_level:
        return log_ratio_BT
    return (log_ratio_BT * mask_BT).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)


def log_weights(difference_BT: Tensor, mask_BT: Tensor, settings: LossSettings) -> Tensor:
    """Return log pi_old - log pi_gen of each token (B, T), or of each completion (B, 1): the sum over its tokens."""
    difference_BT = difference_BT * mask_BT
    return difference_BT.sum(1, keepdim=True) if settings.correction_mode.startswith("sequence") else difference_BT


def correction_weights(difference_BT: Tensor, mask_BT: Tensor, settings: LossSettings) -> Tensor:
    """Return the generator-to-trainer weights: (B, T) in the token modes, (B, 1) in the sequence modes.

    ``*_truncate`` moves a weight outside the bounds to the bound (truncated importance sampling, Ionides 2008; for this
    mismatch Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"). ``*_mask`` sets
    it to 0, so that tokens with such a mismatch are not learnt from (masked importance sampling, Liu et al. 2025, "When
    speed kills stability"; with a lower bound IcePop, arXiv 2510.18855).

    Args:
        difference_BT: log pi_old - log pi_gen of the sampled tokens, without gradient.
        mask_BT: 1 where there is a token.
        settings: Mode and bounds.
    """
    weights = ratios(log_weights(difference_BT, mask_BT, settings))
    lower = -math.inf if settings.correction_min is None else settings.correction_min
    upper = math.inf if settings.correction_max is None else settings.correction_max
    if settings.correction_mode.endswith("truncate"):
        return weights.clamp(min=lower, max=upper)
    return weights.masked_fill((weights < lower) | (weights > upper), 0.0)


def off_policy_mask(
    trainer_logprobs_BT: Tensor, generator_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, threshold: float
) -> Tensor:
    """Return 0 where the advantage is negative and the policy has diverged from the sampling policy, else 1.

    The divergence is the completion's mean of log pi_gen - log pi in nats, compared with ``threshold`` (DeepSeek-V3.2,
    arXiv 2512.02556, equation 9). The result has the shape of the advantages.
    """
    divergence_BT = (generator_logprobs_BT - trainer_logprobs_BT.detach()) * mask_BT
    divergence_B1 = divergence_BT.sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
    return ((advantages_BT >= 0) | (divergence_B1 <= threshold)).to(trainer_logprobs_BT.dtype)
