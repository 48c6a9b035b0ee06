"""Computes each token's term of the loss, to be minimised, from importance ratio and advantage, for each loss type.

Ratios and advantages are (B, T), or (B, 1) if one value holds for the whole completion. Terms have the larger shape of
the two. Here, masks only select the tokens that the statistics count. loss.py masks the terms, corrects them for
off-policy sampling, and divides their sum.

    r  ratio of the policy in training to the policy of the batch's beginning       A  advantage
    B  sequences in a microbatch                                                    T  sampled tokens
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.objective.importance import MAX_LOG_RATIO
from services.trainer.objective.loss_settings import LossSettings
from services.trainer.objective.token_stats import Values, count_terms, true_shares

_LOWEST_LOG = math.log(1e-8)


def objective(
    logprobs_BT: Tensor,
    log_ratio_BT: Tensor,
    ratio: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    weights: Tensor | None,
    settings: LossSettings,
) -> tuple[Tensor, Values]:
    """Return the terms of the configured loss type, (B, T) or (B, 1), and the statistics that only this type has."""
    if settings.loss_type == "sapo":
        return sapo(ratio, advantages_BT, settings), {}
    if settings.loss_type == "cispo":
        num_terms, num_clipped = count_terms((ratio > settings.epsilon_high) & (advantages_BT > 0), mask_BT)
        terms_BT = cispo(ratio, advantages_BT, logprobs_BT, settings)
        return terms_BT, {"num_cispo_terms": num_terms, "num_cispo_clipped": num_clipped}
    if settings.loss_type == "vespo":
        phi_BT = vespo_weights(log_ratio_BT, advantages_BT, mask_BT, weights, settings)
        counts = mask_BT.amax(1, keepdim=True) if phi_BT.shape[1] == 1 else mask_BT
        report: Values = {"num_phi": counts.sum(), "phi_sum": (phi_BT * counts).sum()}
        return vespo(phi_BT, advantages_BT, logprobs_BT), report
    result = clipped(ratio, advantages_BT, settings)
    has_tokens_B = mask_BT.any(1)
    num_terms, num_low_clipped = count_terms(result.is_low_clipped, mask_BT)
    return result.terms, {
        "num_clip_terms": num_terms,
        "num_low_clipped": num_low_clipped,
        "num_high_clipped": count_terms(result.is_high_clipped, mask_BT)[1],
        "low_clipped_min": true_shares(result.is_low_clipped, mask_BT)[has_tokens_B].min(),
        "high_clipped_max": true_shares(result.is_high_clipped, mask_BT)[has_tokens_B].max(),
    }


@dataclass(frozen=True)
class ClippedTerms:
    """Terms of the clipped objective, and where clipping removed the gradient."""

    terms: Tensor
    is_low_clipped: Tensor
    is_high_clipped: Tensor


def clipped(ratio: Tensor, advantages_BT: Tensor, settings: LossSettings) -> ClippedTerms:
    """Return ``-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)``: grpo, bnpo, dr_grpo, dapo, luspo.

    PPO (arXiv 1707.06347, equation 7); with epsilon_high clip-higher (DAPO, arXiv 2503.14476, equation 10). delta
    bounds the term of a token with negative advantage whose probability has risen (two-sided clipping, INTELLECT-2,
    arXiv 2505.07291). A term counts as clipped if clipping removed its gradient.
    """
    low, high = 1 - settings.epsilon_low, 1 + settings.epsilon_high
    bounded = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    return ClippedTerms(
        terms=-torch.min(bounded * advantages_BT, ratio.clamp(low, high) * advantages_BT),
        is_low_clipped=(bounded < low) & (advantages_BT < 0),
        is_high_clipped=(bounded > high) & (advantages_BT > 0),
    )


def cispo(ratio: Tensor, advantages_BT: Tensor, trainer_logprobs_BT: Tensor, settings: LossSettings) -> Tensor:
    """Return ``-sg(min(r, epsilon_high)) A log pi`` (B, T): the weight is clipped, so no token loses its gradient.

    CISPO, MiniMax-M1 (arXiv 2506.13585, equations 4 and 5), with the one-sided bound of ScaleRL (arXiv 2510.13786):
    ``epsilon_high`` is the bound itself, not its distance from 1.
    """
    return -ratio.clamp(max=settings.epsilon_high).detach() * advantages_BT * trainer_logprobs_BT


def sapo(ratio: Tensor, advantages_BT: Tensor, settings: LossSettings) -> Tensor:
    """Return ``-sigmoid(tau (r - 1)) 4 / tau A``: a soft gate instead of the clip (SAPO, arXiv 2511.20347).

    tau is ``sapo_temperature_pos`` where A > 0, else ``sapo_temperature_neg``.
    """
    positive = torch.full_like(advantages_BT, settings.sapo_temperature_pos)
    negative = torch.full_like(advantages_BT, settings.sapo_temperature_neg)
    temperature_BT = torch.where(advantages_BT > 0, positive, negative)
    return -torch.sigmoid(temperature_BT * (ratio - 1)) * 4 / temperature_BT * advantages_BT


def vespo(weight_BT: Tensor, advantages_BT: Tensor, trainer_logprobs_BT: Tensor) -> Tensor:
    """Return ``-phi(w) A log pi`` (B, T). `vespo_weights` computes phi(w) (VESPO, arXiv 2602.10693)."""
    return -weight_BT * advantages_BT * trainer_logprobs_BT


@torch.no_grad()
def vespo_weights(
    log_ratio_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    correction_BT: Tensor | None,
    settings: LossSettings,
) -> Tensor:
    """Return ``phi(w) = e^lambda w^k e^(-lambda w)``, which is 1 at w = 1, in the shape of the advantages.

    w is the completion's probability under the policy in training, divided by its probability under the policy that
    sampled: a product over tokens, with the generator-to-trainer correction. The advantage's sign selects k and lambda.
    """
    log_w_B1 = (log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) * mask_BT).sum(1, keepdim=True)
    if correction_BT is not None:
        log_correction_BT = torch.log(correction_BT).clamp(_LOWEST_LOG, MAX_LOG_RATIO)
        log_w_B1 = log_w_B1 + (log_correction_BT * mask_BT).sum(1, keepdim=True)
    log_w_B1 = log_w_B1.clamp(_LOWEST_LOG, MAX_LOG_RATIO)
    is_nonnegative_BT = advantages_BT >= 0
    k_BT = _by_sign(is_nonnegative_BT, settings.vespo_k_pos, settings.vespo_k_neg, log_w_B1)
    lambda_BT = _by_sign(is_nonnegative_BT, settings.vespo_lambda_pos, settings.vespo_lambda_neg, log_w_B1)
    lambda_BT = lambda_BT.clamp(min=1e-4)
    log_phi_BT = lambda_BT + k_BT * log_w_B1 - lambda_BT * torch.exp(log_w_B1)
    return torch.exp(log_phi_BT).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _by_sign(is_nonnegative_BT: Tensor, nonnegative: float, negative: float, like: Tensor) -> Tensor:
    return torch.where(is_nonnegative_BT, like.new_tensor(nonnegative), like.new_tensor(negative))
