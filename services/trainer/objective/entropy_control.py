"""Uses entropy to choose the tokens that stay in the policy loss and the coefficient of the entropy bonus.

    step k:  loss - applied_coef * mean entropy --> mean entropy of the step --> coefficient of step k + 1

Adaptive control raises the coefficient by a fixed amount after a step with entropy at or below the target, and lowers
it after a step above. The coefficient applies only at or below the target (Skywork-OR1, arXiv 2505.22312), and not
before the first measurement.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.trainer.objective.token_stats import TokenStats
from shared.errors import HeadraceError
from shared.run_options.run_config import RunConfig

_QUANTILE_LIMIT = 1 << 24
"""torch.quantile accepts at most this many elements."""


def high_entropy_threshold(entropies_N: Tensor, *, top_entropy_quantile: float) -> float:
    """Return the entropy at which tokens stay in the policy loss: ``keep = entropies >= threshold``.

    From "Beyond the 80/20 rule", arXiv 2506.01939. Quantiles are interpolated between tokens, as in torch.quantile.

    Args:
        entropies_N: Entropies of all sampled tokens of the step, in nats. Without any, the threshold is infinite.
        top_entropy_quantile: Share of the tokens to keep, 0 to 1; 0 keeps the token of highest entropy.
    """
    if entropies_N.numel() == 0:
        return math.inf
    quantile = 1 - top_entropy_quantile
    entropies_N = entropies_N.detach().float()
    if entropies_N.numel() < _QUANTILE_LIMIT:
        return float(torch.quantile(entropies_N, quantile))
    place = quantile * (entropies_N.numel() - 1)
    below, above = (entropies_N.kthvalue(1 + index).values.double() for index in (math.floor(place), math.ceil(place)))
    return float(below + (above - below) * (place - math.floor(place)))


class EntropyControl:
    """Keeps the coefficient of the entropy bonus, constant or adaptive. Each rank has one, all with the same value."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._coef = config.entropy_coef
        self._last_entropy = math.inf

    @property
    def applied_coef(self) -> float:
        """The coefficient for the next step's loss; if adaptive, 0 unless the last entropy is at most the target."""
        if self._config.use_adaptive_entropy and self._last_entropy > self._config.entropy_target:
            return 0.0
        return self._coef

    def update(self, stats: TokenStats) -> None:
        """Adapt the coefficient after a step, if control is adaptive. ``stats`` covers the step over all ranks."""
        if not self._config.use_adaptive_entropy or not stats.num_bonus_tokens:
            return
        self._last_entropy = stats.bonus_entropy_sum / stats.num_bonus_tokens
        if self._last_entropy <= self._config.entropy_target:
            self._coef = min(self._coef + self._config.entropy_coef_delta, self._config.entropy_coef_max)
        else:
            self._coef = max(self._coef - self._config.entropy_coef_delta, self._config.entropy_coef_min)

    def metrics(self) -> dict[str, float]:
        """Return ``entropy_coef``, even if it does not apply at present; empty in a run without an entropy bonus."""
        has_bonus = self._config.entropy_coef != 0 or self._config.use_adaptive_entropy
        return {"entropy_coef": self._coef} if has_bonus else {}

    def to_json(self) -> dict[str, float | None]:
        """Return the state for a checkpoint, as JSON types."""
        return {
            "entropy_coef": self._coef,
            "last_entropy": self._last_entropy if math.isfinite(self._last_entropy) else None,
        }

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `to_json` returned. The coefficient is clamped to the config's bounds.

        The config's own coefficient stays if control is not adaptive in this run, or if the state has no entropy: the
        run that wrote it had no adaptive control, or no step yet.

        Raises:
            HeadraceError: The state was not written by `to_json`.
        """
        coef, last_entropy = state.get("entropy_coef"), state.get("last_entropy")
        if not isinstance(coef, int | float) or not isinstance(last_entropy, int | float | None):
            raise HeadraceError(
                f"the checkpoint's entropy control is damaged: {dict(state)!r}; use an older checkpoint"
            )
        if self._config.use_adaptive_entropy and last_entropy is not None:
            self._coef = min(max(float(coef), self._config.entropy_coef_min), self._config.entropy_coef_max)
            self._last_entropy = float(last_entropy)
