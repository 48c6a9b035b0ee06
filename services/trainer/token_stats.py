"""Sums over the sampled tokens of a step, from which its metrics are made.

    microbatch --of_microbatch--> TokenStats --+--> TokenStats --metrics()--> TRL's names and numbers

Sums and extremes add up, means do not: everything is divided once, at the end.

    B  sequences in a microbatch       T  tokens
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenStats:
    """What can be added up over microbatches. The identity of the addition is ``TokenStats()``."""

    num_tokens: int = 0
    loss_sum: float = 0.0
    entropy_sum: float = 0.0
    low_clipped_sum: float = 0.0
    high_clipped_sum: float = 0.0
    low_clipped_min: float = math.inf
    """Smallest share of one sequence's tokens."""
    high_clipped_max: float = -math.inf
    """Largest share of one sequence's tokens."""
    weight_sum: float = 0.0
    """Of the importance weights as they were applied, after truncation."""
    weight_min: float = math.inf
    weight_max: float = -math.inf
    num_truncated: float = 0.0
    difference_sum: float = 0.0
    """Of trainer_logprobs - generator_logprobs."""
    difference_abs_sum: float = 0.0
    difference_abs_max: float = -math.inf
    ratio_sum: float = 0.0
    """Of the importance ratio, before truncation."""
    ratio_square_sum: float = 0.0

    @classmethod
    def of_microbatch(
        cls,
        *,
        loss: Tensor,
        difference_BT: Tensor,
        is_low_clipped_BT: Tensor,
        is_high_clipped_BT: Tensor,
        entropies_BT: Tensor | None,
        mask_BT: Tensor,
        importance_cap: float | None,
    ) -> Self:
        """Return the sums of one microbatch.

        Args:
            loss: Summed over its tokens.
            difference_BT: trainer_logprobs - generator_logprobs.
            is_low_clipped_BT: Whether a token's ratio was clipped from below.
            is_high_clipped_BT: The same from above.
            entropies_BT: None counts as zero.
            mask_BT: True where the token was sampled; every sequence has at least one.
            importance_cap: None when no weight was applied.
        """
        num_tokens = int(mask_BT.sum())
        if num_tokens == 0:
            return cls()
        difference = difference_BT[mask_BT].double()
        ratio = torch.exp(difference)
        weight = ratio if importance_cap is None else ratio.clamp(max=importance_cap)
        tokens_B = mask_BT.sum(1).clamp(min=1)
        entropy = difference.new_zeros(()) if entropies_BT is None else entropies_BT[mask_BT].double().sum()
        is_truncated = ratio > (math.inf if importance_cap is None else importance_cap)
        # One transfer from the device for all of them.
        values = torch.stack(
            [
                loss.detach().double(),
                entropy,
                is_low_clipped_BT.sum().double(),
                is_high_clipped_BT.sum().double(),
                (is_low_clipped_BT.sum(1) / tokens_B).min().double(),
                (is_high_clipped_BT.sum(1) / tokens_B).max().double(),
                weight.sum(),
                weight.min(),
                weight.max(),
                is_truncated.sum().double(),
                difference.sum(),
                difference.abs().sum(),
                difference.abs().max(),
                ratio.sum(),
                ratio.square().sum(),
            ]
        )
        return cls(num_tokens, *map(float, values.cpu().numpy()))

    def __add__(self, other: "TokenStats") -> "TokenStats":
        return TokenStats(
            num_tokens=self.num_tokens + other.num_tokens,
            loss_sum=self.loss_sum + other.loss_sum,
            entropy_sum=self.entropy_sum + other.entropy_sum,
            low_clipped_sum=self.low_clipped_sum + other.low_clipped_sum,
            high_clipped_sum=self.high_clipped_sum + other.high_clipped_sum,
            low_clipped_min=min(self.low_clipped_min, other.low_clipped_min),
            high_clipped_max=max(self.high_clipped_max, other.high_clipped_max),
            weight_sum=self.weight_sum + other.weight_sum,
            weight_min=min(self.weight_min, other.weight_min),
            weight_max=max(self.weight_max, other.weight_max),
            num_truncated=self.num_truncated + other.num_truncated,
            difference_sum=self.difference_sum + other.difference_sum,
            difference_abs_sum=self.difference_abs_sum + other.difference_abs_sum,
            difference_abs_max=max(self.difference_abs_max, other.difference_abs_max),
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_square_sum=self.ratio_square_sum + other.ratio_square_sum,
        )

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log, under TRL's names where TRL has one; nothing if there was no token.

        ``mismatch_kl/k1`` and ``/k3`` estimate KL(generator || trainer) from the generator's own tokens: the mean of
        -log r and of r - 1 - log r for r the importance ratio (http://joschu.net/blog/kl-approx.html).
        ``effective_sample_size`` is (sum r)^2 / (N sum r^2), between 1/N and 1.
        """
        n = self.num_tokens
        if n == 0:
            return {}
        return {
            "loss": self.loss_sum / n,
            "entropy": self.entropy_sum / n,
            "clip_ratio/low_mean": self.low_clipped_sum / n,
            "clip_ratio/low_min": self.low_clipped_min,
            "clip_ratio/high_mean": self.high_clipped_sum / n,
            "clip_ratio/high_max": self.high_clipped_max,
            "clip_ratio/region_mean": (self.low_clipped_sum + self.high_clipped_sum) / n,
            "sampling/sampling_logp_difference/mean": self.difference_abs_sum / n,
            "sampling/sampling_logp_difference/max": self.difference_abs_max,
            "sampling/importance_sampling_ratio/min": self.weight_min,
            "sampling/importance_sampling_ratio/mean": self.weight_sum / n,
            "sampling/importance_sampling_ratio/max": self.weight_max,
            "sampling/truncated_share": self.num_truncated / n,
            "mismatch_kl/k1": -self.difference_sum / n,
            "mismatch_kl/k3": (self.ratio_sum - self.difference_sum) / n - 1,
            "effective_sample_size": self.ratio_sum**2 / (n * self.ratio_square_sum),
        }
