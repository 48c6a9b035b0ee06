"""The loss of one optimizer step, a microbatch at a time. Pure.

    terms = objective(pi / anchor, A)                             policy_objectives.py, one function per loss type;
                                                                  anchor is pi_old, or pi_gen without use_decoupled_loss
    terms = terms * off-policy mask * high-entropy mask           excludes completions and tokens
    terms = terms * pi_old / pi_gen                               importance.py: a constant
    terms = terms + beta * KL(pi || pi_ref)
    loss  = (sum of terms over rows and tokens) / a total of the whole step  -  entropy_coef * mean entropy
            + router_aux_loss_coef * load-balancing loss          for mixture-of-experts models

Every sum is divided here, by totals of the whole step. The losses of a step's microbatches, on any number of ranks,
therefore add up to TRL's loss, and batching does not change it. docs/algorithms.md has each option's equation, and
tests/conformance compares all of them with TRL's GRPOTrainer.

    B  rows in a microbatch       T  sampled tokens of the longest
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.objective.importance import (
    MAX_LOG_RATIO,
    correction_weights,
    log_ratios,
    log_weights,
    off_policy_mask,
    ratios,
)
from services.trainer.objective.loss_settings import LossSettings
from services.trainer.objective.policy_objectives import objective
from services.trainer.objective.token_stats import TokenStats, count_terms, mismatch_values, weight_values


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Denominators of the loss: totals of an optimizer step over all its microbatches and ranks."""

    num_rollouts: int
    """Rollouts of the step. Truncated ones that were left out count, as in TRL's means over completions."""
    num_tokens: float
    """Sampled tokens in the loss of a step, on average over the batch; for dapo, cispo and vespo."""
    num_step_tokens: int
    """Sampled tokens in the loss of this optimizer step; for bnpo and the entropy bonus."""
    num_kept_tokens: int | None = None
    """The step's tokens that top_entropy_quantile keeps; None means all. The entropy bonus is a mean over these."""
    num_pass_tokens: int | None = None
    """All tokens of the step's rows, including prompts; needed for the load-balancing loss of experts."""


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of one microbatch, and statistics of its tokens."""

    loss: Tensor
    """This microbatch's part of the step's loss; a scalar to call ``backward`` on."""
    stats: TokenStats


def policy_loss(
    *,
    trainer_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor | None,
    generator_logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor | None,
    entropies_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    shares_B: Tensor,
    keep_BT: Tensor | None,
    totals: StepTotals,
    settings: LossSettings,
    entropy_coef: float,
) -> PolicyLoss:
    """Return the microbatch's part of the step's loss, and the statistics of its tokens.

    Args:
        trainer_logprobs_BT: Log p in nats of each token under the policy in training, with gradient.
        old_logprobs_BT: Logprobs under the policy at the batch's beginning; None if that is the policy in training.
        generator_logprobs_BT: Logprobs that the generator recorded when it sampled. NaN means unknown: the token then
            counts as one on which trainer and generator agree.
        reference_logprobs_BT: Logprobs under the reference model; needed for a KL term.
        entropies_BT: The trained policy's entropy at each token, in nats; with gradient for an entropy bonus.
        advantages_BT: Advantage of each token, or (B, 1) for one advantage per row.
        mask_BT: True where the token was sampled. Values elsewhere are ignored.
        shares_B: Each row's share of the sampled tokens of its rollout; 1 if it is the only row.
        keep_BT: True for the high-entropy tokens that stay in the policy loss; None keeps all tokens.
        totals: Totals of the whole step.
        settings: Settings of the run.
        entropy_coef: Coefficient of the entropy bonus in this step.

    Raises:
        ValueError: There is a KL term without reference_logprobs_BT, or an entropy bonus over kept tokens without
            totals.num_kept_tokens.
    """
    is_sampled_BT = mask_BT.bool()
    if not bool(is_sampled_BT.any()):
        return PolicyLoss(loss=torch.where(is_sampled_BT, trainer_logprobs_BT, 0.0).sum(), stats=TokenStats())
    logprobs_BT = _only(is_sampled_BT, trainer_logprobs_BT)
    old_BT = logprobs_BT.detach() if old_logprobs_BT is None else _only(is_sampled_BT, old_logprobs_BT)
    is_known_BT = is_sampled_BT & ~generator_logprobs_BT.isnan()
    generator_BT = torch.where(is_known_BT, generator_logprobs_BT, old_BT)
    entropies_BT = _only(is_sampled_BT, entropies_BT)
    mask_BT = is_sampled_BT.to(logprobs_BT.dtype)
    advantages_BT = advantages_BT.to(logprobs_BT.dtype)
    if advantages_BT.shape[1] > 1:
        advantages_BT = _only(is_sampled_BT, advantages_BT)

    # Without decoupling, the loss clips around the policy that sampled and not around the batch's first policy.
    anchor_BT = old_BT if settings.use_decoupled_loss else generator_BT
    log_ratio_BT = logprobs_BT - anchor_BT
    log_ratio = log_ratios(log_ratio_BT, mask_BT, is_sequence_level=settings.is_sequence_level)
    ratio = ratios(log_ratio)
    num_bounded = _num_bounded(log_ratio, mask_BT)

    difference_BT = old_BT - generator_BT
    weights = correction_weights(difference_BT, mask_BT, settings) if settings.corrects else None

    terms, values = objective(logprobs_BT, log_ratio_BT, ratio, advantages_BT, mask_BT, weights, settings)
    if settings.off_policy_mask_threshold is not None:
        terms = terms * off_policy_mask(
            logprobs_BT,
            torch.where(is_known_BT, generator_BT, logprobs_BT.detach()),
            advantages_BT,
            mask_BT,
            settings.off_policy_mask_threshold,
        )
    if keep_BT is not None:
        terms = terms * keep_BT
    if weights is not None and settings.loss_type != "vespo":  # vespo's own weight contains them
        terms = terms * weights
    if settings.beta != 0:
        if reference_logprobs_BT is None:
            raise ValueError(f"beta={settings.beta} needs reference_logprobs_BT")
        kl_log_ratio_BT = _only(is_sampled_BT, reference_logprobs_BT) - logprobs_BT
        kl_BT = _k3(kl_log_ratio_BT)
        if settings.use_bias_correction_kl:
            kl_BT = kl_BT * ratio
        terms = terms + settings.beta * kl_BT
        values |= {"num_kl_tokens": mask_BT.sum(), "kl_sum": (kl_BT * mask_BT).sum()}
        num_bounded += _num_bounded(kl_log_ratio_BT, mask_BT)

    loss = _aggregated(terms, mask_BT, shares_B, totals, settings)
    values["policy_loss"] = loss
    if settings.has_entropy_bonus:
        acts_on_BT = mask_BT if keep_BT is None else mask_BT * keep_BT
        bonus_entropy_sum = (entropies_BT * acts_on_BT).sum()
        loss = loss - entropy_coef * bonus_entropy_sum / _num_bonus_tokens(totals, has_kept=keep_BT is not None)
        values |= {"num_bonus_tokens": acts_on_BT.sum(), "bonus_entropy_sum": bonus_entropy_sum}
    values |= {"loss": loss, "num_tokens": mask_BT.sum(), "entropy_sum": (entropies_BT * mask_BT).sum()}

    with torch.no_grad():
        values |= mismatch_values(difference_BT[is_known_BT])
        if weights is not None:
            log_weight = log_weights(difference_BT, mask_BT, settings)
            is_cut = weights != ratios(log_weight)
            values |= weight_values(weights, is_cut, is_sampled_BT)
            num_bounded += count_terms((log_weight > MAX_LOG_RATIO) & ~is_cut, mask_BT)[1]
        values["num_bounded_ratios"] = num_bounded
        return PolicyLoss(loss=loss, stats=TokenStats.of_tensors(values))


def _k3(log_ratio_BT: Tensor) -> Tensor:
    """Return the k3 estimate of KL(pi || pi_ref) at each token (http://joschu.net/blog/kl-approx.html).

    ``expm1`` is used because ``exp(x) - 1`` loses all digits of a small x, and x is small for most tokens.

    Args:
        log_ratio_BT: log pi_ref - log pi. Bounded like the ratios of importance.py.
    """
    bounded_BT = log_ratio_BT.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(bounded_BT) - bounded_BT


def _num_bounded(log_ratio: Tensor, mask_BT: Tensor) -> Tensor:
    return count_terms(log_ratio > MAX_LOG_RATIO, mask_BT)[1]


def _aggregated(terms: Tensor, mask_BT: Tensor, shares_B: Tensor, totals: StepTotals, settings: LossSettings) -> Tensor:
    """Sum the terms over tokens, divided as the loss type requires.

    grpo, sapo: a mean over rollouts of means over tokens (DeepSeekMath, arXiv 2402.03300, equation 3). dapo, cispo,
    vespo: a mean over all tokens of the batch (DAPO, arXiv 2503.14476, equation 8). bnpo: a mean over the step's own
    tokens. dr_grpo: a sum divided by a constant, so that tokens of long completions do not count less (arXiv
    2503.20783, section 3.2). luspo: a mean over rollouts of sums over tokens (arXiv 2602.05261).

    The mean over a rollout's tokens is the sum of its rows' means, each times the row's share of these tokens.
    """
    terms_BT = terms * mask_BT
    match settings.loss_type:
        case "grpo" | "sapo":
            return (terms_BT.sum(1) / mask_BT.sum(1).clamp(min=1) * shares_B).sum() / totals.num_rollouts
        case "luspo":
            return terms_BT.sum() / totals.num_rollouts
        case "dr_grpo":
            return terms_BT.sum() / (totals.num_rollouts * settings.max_completion_length)
        case "bnpo":
            return terms_BT.sum() / max(totals.num_step_tokens, 1)
        case "dapo" | "cispo" | "vespo":
            return terms_BT.sum() / max(totals.num_tokens, 1.0)


def _num_bonus_tokens(totals: StepTotals, *, has_kept: bool) -> int:
    if not has_kept:
        return max(totals.num_step_tokens, 1)
    if totals.num_kept_tokens is None:
        raise ValueError("an entropy bonus over the tokens of highest entropy needs totals.num_kept_tokens")
    return max(totals.num_kept_tokens, 1)


def _only(is_sampled_BT: Tensor, values_BT: Tensor) -> Tensor:
    """Return the values with 0 outside the mask, where they may be NaN. The gradient there is 0 as well."""
    return torch.where(is_sampled_BT, values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device))
