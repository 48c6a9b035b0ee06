"""The loss of one optimizer step, a microbatch at a time. Pure.

    terms = objective(pi / pi_old, A)                             policy_objectives.py, one function a loss type
    terms = terms * off-policy mask * high-entropy mask           what is left out
    terms = terms * pi_old / pi_gen                               importance.py: a constant
    terms = terms + beta * KL(pi || pi_ref)
    loss  = (sum of terms over completions and tokens) / what the whole step says  -  entropy_coef * mean entropy
            + router_aux_loss_coef * load-balancing loss          of mixture-of-experts models

Every sum is divided here, by numbers of the whole step: summing the losses of a step's microbatches, on however many
ranks, gives TRL's loss, and how rows are batched changes nothing. docs/algorithms.md has each option's equation, and
tests/conformance compares all of it with TRL's GRPOTrainer.

    B  sequences in a microbatch       T  sampled tokens of its longest
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.objective import policy_objectives
from services.trainer.objective.importance import (
    MAX_LOG_RATIO,
    correction_weights,
    log_ratios,
    log_weights,
    off_policy_mask,
    ratios,
)
from services.trainer.objective.loss_settings import LossSettings
from services.trainer.objective.token_stats import TokenStats

Values = dict[str, Tensor | int]
"""Fields of `TokenStats` by name."""


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """What the loss is divided by: of the whole optimizer step, over all its microbatches and ranks."""

    num_rows: int
    """Rows of the step. Truncated ones that were left out count, as they do in TRL's means over rows."""
    num_tokens: float
    """Sampled tokens in the loss of the whole batch, over steps_per_generation; for dapo, cispo and vespo."""
    num_step_tokens: int
    """Sampled tokens in the loss of this optimizer step; for bnpo and the entropy bonus."""
    num_kept_tokens: int | None = None
    """Those of them that top_entropy_quantile keeps; None is all. The entropy bonus is a mean over these."""
    num_pass_tokens: int | None = None
    """All tokens of the rows of the step, prompts too; needed for the load-balancing loss of experts."""


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of one microbatch, and what there is to say of its tokens."""

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
    keep_BT: Tensor | None,
    totals: StepTotals,
    settings: LossSettings,
    entropy_coef: float,
) -> PolicyLoss:
    """Return the microbatch's part of the step's loss, and the statistics of its tokens.

    Args:
        trainer_logprobs_BT: With gradient; log p in nats of each token under the policy in training.
        old_logprobs_BT: Under the policy at the batch's beginning; None where that is the policy in training itself.
        generator_logprobs_BT: Under the policy that sampled, as the generator recorded them; NaN where it could not
            tell, and the token is taken as one that trainer and generator agree on.
        reference_logprobs_BT: Under the reference model; needed if there is a KL term.
        entropies_BT: Of the policy in training at each token, in nats; with gradient if there is an entropy bonus.
        advantages_BT: Of each token; (B, 1) if one is that of all tokens of its sequence.
        mask_BT: True where the token was sampled. What stands elsewhere is never looked at.
        keep_BT: True for tokens of high entropy, which alone stay in the policy loss; None keeps all.
        totals: Of the whole step.
        settings: Of the run.
        entropy_coef: Of the entropy bonus, as it applies in this step.

    Raises:
        ValueError: There is a KL term and no reference_logprobs_BT, or an entropy bonus over kept tokens without their
            number.
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

    # Without decoupling the clip holds on to the policy that sampled, whatever the trainer was when the batch began.
    anchor_BT = old_BT if settings.use_decoupled_loss else generator_BT
    log_ratio_BT = logprobs_BT - anchor_BT
    log_ratio = log_ratios(log_ratio_BT, mask_BT, is_sequence_level=settings.is_sequence_level)
    ratio = ratios(log_ratio)
    num_bounded = _num_bounded(log_ratio, mask_BT)

    difference_BT = old_BT - generator_BT
    weights = correction_weights(difference_BT, mask_BT, settings) if settings.corrects else None

    terms, values = _objective(logprobs_BT, log_ratio_BT, ratio, advantages_BT, mask_BT, weights, settings)
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
    if weights is not None and settings.loss_type != "vespo":  # vespo has them in its own weight
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

    loss = _aggregated(terms, mask_BT, totals, settings)
    values["policy_loss"] = loss
    if settings.has_entropy_bonus:
        acts_on_BT = mask_BT if keep_BT is None else mask_BT * keep_BT
        bonus_entropy_sum = (entropies_BT * acts_on_BT).sum()
        loss = loss - entropy_coef * bonus_entropy_sum / _num_bonus_tokens(totals, has_kept=keep_BT is not None)
        values |= {"num_bonus_tokens": acts_on_BT.sum(), "bonus_entropy_sum": bonus_entropy_sum}
    values |= {"loss": loss, "num_tokens": mask_BT.sum(), "entropy_sum": (entropies_BT * mask_BT).sum()}

    with torch.no_grad():
        values |= _mismatch_values(difference_BT[is_known_BT])
        if weights is not None:
            log_weight = log_weights(difference_BT, mask_BT, settings)
            is_cut = weights != ratios(log_weight)
            values |= _weight_values(weights, is_cut, is_sampled_BT)
            num_bounded += _count((log_weight > MAX_LOG_RATIO) & ~is_cut, mask_BT)[1]
        values["num_bounded_ratios"] = num_bounded
        return PolicyLoss(loss=loss, stats=TokenStats.of_tensors(values))


def add_router_loss(
    result: PolicyLoss, router_loss: Tensor, *, coef: float, num_tokens: int, totals: StepTotals
) -> PolicyLoss:
    """Return the loss of one pass with its share of the step's load-balancing loss added.

    The step's is the mean over its passes, each counted by its tokens.

    Args:
        result: Of the rows of the pass.
        router_loss: Of the pass (router_loss.py).
        coef: What it is multiplied by.
        num_tokens: Of the pass, prompts too.
        totals: Of the whole step.

    Raises:
        ValueError: The totals do not have the number of tokens of the step.
    """
    if totals.num_pass_tokens is None:
        raise ValueError("the load-balancing loss of a step needs totals.num_pass_tokens")
    term = coef * router_loss * (num_tokens / max(totals.num_pass_tokens, 1))
    values: Values = {"loss": term, "num_router_tokens": num_tokens, "router_loss_sum": router_loss * num_tokens}
    return PolicyLoss(loss=result.loss + term, stats=result.stats + TokenStats.of_tensors(values))


def _objective(
    logprobs_BT: Tensor,
    log_ratio_BT: Tensor,
    ratio: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    weights: Tensor | None,
    settings: LossSettings,
) -> tuple[Tensor, Values]:
    """Return the loss type's terms, (B, T) or (B, 1), and what it alone has to report."""
    if settings.loss_type == "sapo":
        return policy_objectives.sapo(ratio, advantages_BT, settings), {}
    if settings.loss_type == "cispo":
        num_terms, num_clipped = _count((ratio > settings.epsilon_high) & (advantages_BT > 0), mask_BT)
        terms_BT = policy_objectives.cispo(ratio, advantages_BT, logprobs_BT, settings)
        return terms_BT, {"num_cispo_terms": num_terms, "num_cispo_clipped": num_clipped}
    if settings.loss_type == "vespo":
        phi_BT = policy_objectives.vespo_weights(log_ratio_BT, advantages_BT, mask_BT, weights, settings)
        counts = mask_BT.amax(1, keepdim=True) if phi_BT.shape[1] == 1 else mask_BT
        report: Values = {"num_phi": counts.sum(), "phi_sum": (phi_BT * counts).sum()}
        return policy_objectives.vespo(phi_BT, advantages_BT, logprobs_BT), report
    result = policy_objectives.clipped(ratio, advantages_BT, settings)
    has_tokens_B = mask_BT.any(1)
    num_terms, num_low_clipped = _count(result.is_low_clipped, mask_BT)
    return result.terms, {
        "num_clip_terms": num_terms,
        "num_low_clipped": num_low_clipped,
        "num_high_clipped": _count(result.is_high_clipped, mask_BT)[1],
        "low_clipped_min": _shares(result.is_low_clipped, mask_BT)[has_tokens_B].min(),
        "high_clipped_max": _shares(result.is_high_clipped, mask_BT)[has_tokens_B].max(),
    }


def _k3(log_ratio_BT: Tensor) -> Tensor:
    """Return the k3 estimate of KL(pi || pi_ref) at each token (http://joschu.net/blog/kl-approx.html).

    ``exp(x) - 1`` would lose all digits of a small x, and most tokens have one.

    Args:
        log_ratio_BT: log pi_ref - log pi; bounded as the ratios of importance.py are.
    """
    bounded_BT = log_ratio_BT.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(bounded_BT) - bounded_BT


def _num_bounded(log_ratio: Tensor, mask_BT: Tensor) -> Tensor:
    return _count(log_ratio > MAX_LOG_RATIO, mask_BT)[1]


def _aggregated(terms: Tensor, mask_BT: Tensor, totals: StepTotals, settings: LossSettings) -> Tensor:
    """Return the sum over tokens, each as large as its loss type has it.

    grpo, sapo: a mean over rows of means over tokens (DeepSeekMath, arXiv 2402.03300, equation 3). dapo, cispo, vespo:
    one mean over all tokens (DAPO, arXiv 2503.14476, equation 8). bnpo: the same over the step's own tokens. dr_grpo: a
    constant, so that long answers count no less (arXiv 2503.20783, section 3.2). luspo: a mean over rows of sums
    (arXiv 2602.05261).
    """
    terms_BT = terms * mask_BT
    match settings.loss_type:
        case "grpo" | "sapo":
            return (terms_BT.sum(1) / mask_BT.sum(1).clamp(min=1)).sum() / totals.num_rows
        case "luspo":
            return terms_BT.sum() / totals.num_rows
        case "dr_grpo":
            return terms_BT.sum() / (totals.num_rows * settings.max_completion_length)
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
    """Return the values with 0 outside the mask, where even NaN may stand; the gradient there is 0 as well."""
    return torch.where(is_sampled_BT, values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device))


def _count(is_true: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of terms, and that of the true ones: of tokens (B, T), or of completions (B, 1)."""
    counts = mask_BT.amax(1, keepdim=True) if is_true.shape[1] == 1 else mask_BT
    return counts.sum(), (is_true * counts).sum()


def _shares(is_true: Tensor, mask_BT: Tensor) -> Tensor:
    """Return each completion's share of true terms (B,)."""
    if is_true.shape[1] == 1:
        return is_true.squeeze(1).to(mask_BT.dtype)
    return (is_true * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)


def _mismatch_values(difference_N: Tensor) -> Values:
    """Return how far the trainer was from the generator, over the N tokens of the microbatch that both scored."""
    if not difference_N.numel():
        return {}
    difference_N = difference_N.double()
    ratio_N = ratios(difference_N)
    return {
        "num_known_tokens": difference_N.numel(),
        "difference_sum": difference_N.sum(),
        "difference_abs_sum": difference_N.abs().sum(),
        "difference_abs_max": difference_N.abs().max(),
        "ratio_sum": ratio_N.sum(),
        "ratio_square_sum": ratio_N.square().sum(),
    }


def _weight_values(weights: Tensor, is_cut: Tensor, is_sampled_BT: Tensor) -> Values:
    """Return what became of the generator-to-trainer weights, those of tokens or of completions."""
    counts = is_sampled_BT.any(1, keepdim=True) if weights.shape[1] == 1 else is_sampled_BT
    weights_N = weights[counts]
    return {
        "num_weights": weights_N.numel(),
        "weight_sum": weights_N.double().sum(),
        "weight_min": weights_N.min(),
        "weight_max": weights_N.max(),
        "num_cut_weights": is_cut[counts].sum(),
    }
