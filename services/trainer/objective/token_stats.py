"""Keeps sums over the sampled tokens of a step, and computes the step's metrics from them.

    microbatch --of_tensors--> TokenStats --+--> TokenStats --metrics()--> TRL's names and numbers
    other rank --from_floats------------------^

Only sums and extremes are kept, because means cannot be added; division comes once, at the end. A metric is reported if
and only if something was counted for it, so that each loss type has the same metrics as in TRL.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Self

import torch
from torch import Tensor

from services.trainer.objective.importance import ratios

Values = dict[str, Tensor | int]
"""Fields of `TokenStats` by name."""


@dataclass(frozen=True)
class TokenStats:
    """Statistics that add up over microbatches and ranks. The identity of the addition is ``TokenStats()``.

    Fields that end in ``_min`` and ``_max`` keep the extreme; all others are sums. A "term" is a token, or a completion
    at sequence level.
    """

    num_tokens: float = 0.0
    loss: float = 0.0
    """The minimised loss, already divided: its sum over a step is the step's loss."""
    policy_loss: float = 0.0
    """The same without the entropy bonus and the load-balancing loss."""
    entropy_sum: float = 0.0
    num_router_tokens: float = 0.0
    """All tokens of the passes with a load-balancing loss; 0 without one."""
    router_loss_sum: float = 0.0
    """Sum of the load-balancing losses, each times the tokens of its pass."""
    num_bonus_tokens: float = 0.0
    """Tokens that the entropy bonus acts on; 0 without one."""
    bonus_entropy_sum: float = 0.0
    num_kl_tokens: float = 0.0
    kl_sum: float = 0.0
    num_bounded_ratios: float = 0.0
    """Ratios above e^20, which count as e^20 (importance.py)."""
    num_clip_terms: float = 0.0
    num_low_clipped: float = 0.0
    num_high_clipped: float = 0.0
    low_clipped_min: float = math.inf
    """Smallest share of clipped terms in one completion."""
    high_clipped_max: float = -math.inf
    """Largest share of clipped terms in one completion."""
    num_cispo_terms: float = 0.0
    num_cispo_clipped: float = 0.0
    num_phi: float = 0.0
    phi_sum: float = 0.0
    num_weights: float = 0.0
    """Generator-to-trainer weights that were applied, one per token or per completion."""
    weight_sum: float = 0.0
    weight_min: float = math.inf
    weight_max: float = -math.inf
    num_cut_weights: float = 0.0
    """Weights that were moved to a bound or set to 0."""
    num_known_tokens: float = 0.0
    """Tokens with a known generator logprob. The differences and ratios below cover these tokens."""
    difference_sum: float = 0.0
    """Sum over tokens of log pi_old - log pi_gen."""
    difference_abs_sum: float = 0.0
    difference_abs_max: float = -math.inf
    ratio_sum: float = 0.0
    """Sum over tokens of pi_old / pi_gen, before truncation or masking."""
    ratio_square_sum: float = 0.0

    @classmethod
    def of_tensors(cls, values: Values) -> Self:
        """Return stats with these field values. All tensors are copied from the device in one transfer."""
        on_device = [value.detach().double() for value in values.values() if isinstance(value, Tensor)]
        arrived = iter(torch.stack(on_device).cpu().numpy() if on_device else ())
        return cls(
            **{name: float(next(arrived) if isinstance(value, Tensor) else value) for name, value in values.items()}
        )

    def __add__(self, other: "TokenStats") -> "TokenStats":
        return TokenStats(
            *(
                _combine(field.name, mine, theirs)
                for field, mine, theirs in zip(fields(self), self.to_floats(), other.to_floats(), strict=True)
            )
        )

    def to_floats(self) -> list[float]:
        """Return the fields in order. Another rank reads them with `from_floats`."""
        return [float(value) for value in astuple(self)]

    @classmethod
    def from_floats(cls, floats: Sequence[float]) -> Self:
        """Return the stats whose `to_floats` gave this list."""
        return cls(*map(float, floats))

    def metrics(self) -> dict[str, float]:
        """Return the metrics to log, under TRL's names where TRL has one. Means over no tokens are NaN.

        ``mismatch_kl/k1`` and ``/k3`` estimate KL(pi_gen || pi_old) from the generator's own tokens: the means of -log
        r and of r - 1 - log r, where r is the token's ratio (http://joschu.net/blog/kl-approx.html).
        ``effective_sample_size`` is (sum r)^2 / (N sum r^2), between 1/N and 1.
        """
        n = self.num_tokens or math.nan
        metrics = {"loss": self.loss, "entropy": self.entropy_sum / n, "num_bounded_ratios": self.num_bounded_ratios}
        if self.num_bonus_tokens:
            metrics["policy_loss"] = self.policy_loss
        if self.num_router_tokens:
            metrics["aux_loss"] = self.router_loss_sum / self.num_router_tokens
        if self.num_kl_tokens:
            metrics["kl"] = self.kl_sum / self.num_kl_tokens
        if self.num_clip_terms:
            metrics["clip_ratio/low_mean"] = self.num_low_clipped / self.num_clip_terms
            metrics["clip_ratio/low_min"] = self.low_clipped_min
            metrics["clip_ratio/high_mean"] = self.num_high_clipped / self.num_clip_terms
            metrics["clip_ratio/high_max"] = self.high_clipped_max
            metrics["clip_ratio/region_mean"] = (self.num_low_clipped + self.num_high_clipped) / self.num_clip_terms
        if self.num_cispo_terms:
            metrics["cispo_clip_ratio"] = self.num_cispo_clipped / self.num_cispo_terms
        if self.num_phi:
            metrics["vespo/phi_seq_mean"] = self.phi_sum / self.num_phi
        metrics["sampling/no_logprob_share"] = 1 - self.num_known_tokens / n
        if self.num_weights:
            metrics["sampling/importance_sampling_ratio/min"] = self.weight_min
            metrics["sampling/importance_sampling_ratio/mean"] = self.weight_sum / self.num_weights
            metrics["sampling/importance_sampling_ratio/max"] = self.weight_max
            metrics["sampling/truncated_share"] = self.num_cut_weights / self.num_weights
        return metrics | self._mismatch_metrics()

    def _mismatch_metrics(self) -> dict[str, float]:
        n = self.num_known_tokens
        if n == 0:
            return {}
        metrics = {
            "sampling/sampling_logp_difference/mean": self.difference_abs_sum / n,
            "sampling/sampling_logp_difference/max": self.difference_abs_max,
            "mismatch_kl/k1": -self.difference_sum / n,
            "mismatch_kl/k3": (self.ratio_sum - self.difference_sum) / n - 1,
        }
        if self.ratio_square_sum:
            metrics["effective_sample_size"] = self.ratio_sum**2 / (n * self.ratio_square_sum)
        return metrics


def _combine(name: str, mine: float, theirs: float) -> float:
    if name.endswith("_min"):
        return min(mine, theirs)
    if name.endswith("_max"):
        return max(mine, theirs)
    return mine + theirs


def count_terms(is_true: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of all and of true terms: tokens if ``is_true`` is (B, T), completions if it is (B, 1)."""
    counts = mask_BT.amax(1, keepdim=True) if is_true.shape[1] == 1 else mask_BT
    return counts.sum(), (is_true * counts).sum()


def true_shares(is_true: Tensor, mask_BT: Tensor) -> Tensor:
    """Return, for each completion, the share of its terms for which ``is_true`` holds, (B,)."""
    if is_true.shape[1] == 1:
        return is_true.squeeze(1).to(mask_BT.dtype)
    return (is_true * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)


def mismatch_values(difference_N: Tensor) -> Values:
    """Return statistics of pi_old / pi_gen over the N tokens with a known generator logprob; empty if N is 0."""
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


def weight_values(weights: Tensor, is_cut: Tensor, is_sampled_BT: Tensor) -> Values:
    """Return statistics of the generator-to-trainer weights, which are per token or per completion."""
    counts = is_sampled_BT.any(1, keepdim=True) if weights.shape[1] == 1 else is_sampled_BT
    weights_N = weights[counts]
    return {
        "num_weights": weights_N.numel(),
        "weight_sum": weights_N.double().sum(),
        "weight_min": weights_N.min(),
        "weight_max": weights_N.max(),
        "num_cut_weights": is_cut[counts].sum(),
    }
