"""The clipped policy-gradient loss, summed over tokens, with truncated importance sampling. Pure.

    ratio   = exp(trainer_logprobs - old_logprobs)                        what the gradient flows through
    clipped = -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A)
    weight  = min(exp(trainer_logprobs - generator_logprobs), cap)        a constant, never differentiated
    loss    = sum over sampled tokens of weight * clipped

DAPO (arXiv 2503.14476) equations 8 to 12: clip-higher, and one mean over all tokens of the step instead of a mean of
means. The division by the number of tokens is left to whoever takes the step, so that this sum does not depend on how
rows are batched. The weight corrects for tokens having been sampled by another engine and by an older policy: truncated
importance sampling (Ionides 2008; for this mismatch Yao et al. 2025, "Your efficient RL framework secretly brings you
off-policy RL training"), TRL's ``vllm_importance_sampling_mode="token_truncate"``.

    B  sequences in a microbatch       T  tokens
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.token_stats import TokenStats


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one microbatch, and what there is to say of its tokens."""

    loss: Tensor
    """Summed over sampled tokens, not normalised; a scalar to call ``backward`` on."""
    stats: TokenStats


def dapo_token_loss(
    *,
    trainer_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    generator_logprobs_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    clip_range: tuple[float, float],
    importance_cap: float | None,
    entropies_BT: Tensor | None = None,
) -> TokenLoss:
    """Return the summed loss and the statistics of the sampled tokens.

    Args:
        trainer_logprobs_BT: With gradient; log p in nats of each token under the policy in training.
        old_logprobs_BT: Of the policy that the clip holds on to. ``trainer_logprobs_BT.detach()`` for the first and
            only update on these tokens: the ratio is then 1, and the importance weight carries the whole correction.
        generator_logprobs_BT: Of the policy that sampled, as the generator recorded them.
        advantages_B: One a sequence.
        mask_BT: True where the token was sampled. What stands elsewhere is never looked at.
        clip_range: (1 - epsilon, 1 + epsilon_high).
        importance_cap: Truncation of the importance weight; None leaves the weight out.
        entropies_BT: For the statistics alone.
    """
    mask_BT = mask_BT.bool()
    zero = torch.zeros((), dtype=trainer_logprobs_BT.dtype, device=trainer_logprobs_BT.device)
    advantages_B1 = advantages_B.to(trainer_logprobs_BT.dtype).unsqueeze(1)

    log_ratio_BT = torch.where(mask_BT, trainer_logprobs_BT - old_logprobs_BT, zero)
    ratio_BT = torch.exp(log_ratio_BT)
    per_token_BT = -torch.min(ratio_BT * advantages_B1, ratio_BT.clamp(*clip_range) * advantages_B1)

    difference_BT = torch.where(mask_BT, trainer_logprobs_BT.detach() - generator_logprobs_BT, zero)
    if importance_cap is not None:
        per_token_BT = per_token_BT * torch.exp(difference_BT).clamp(max=importance_cap)
    loss = torch.where(mask_BT, per_token_BT, zero).sum()

    with torch.no_grad():
        is_low_clipped_BT = (ratio_BT < clip_range[0]) & (advantages_B1 < 0) & mask_BT
        is_high_clipped_BT = (ratio_BT > clip_range[1]) & (advantages_B1 > 0) & mask_BT
        stats = TokenStats.of_microbatch(
            loss=loss,
            difference_BT=difference_BT,
            is_low_clipped_BT=is_low_clipped_BT,
            is_high_clipped_BT=is_high_clipped_BT,
            entropies_BT=entropies_BT,
            mask_BT=mask_BT,
            importance_cap=importance_cap,
        )
    return TokenLoss(loss=loss, stats=stats)
