"""What entropy decides: which tokens stay in the policy loss, and how large the entropy bonus is.

    step k:  loss - applied_coef * mean entropy --> mean entropy of the step --> coefficient of step k + 1

Adaptive control raises the coefficient a little while entropy is at or below its target, lowers it a little above, and
applies it only at or below (Skywork-OR1, arXiv 2505.22312). Before anything was measured nothing is applied.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.trainer.objective.token_stats import TokenStats
from shared.errors import HeadraceError
from shared.run_config import RunConfig

_QUANTILE_LIMIT = 1 << 24
"""torch.quantile takes no more elements than this."""


def high_entropy_threshold(entropies_N: Tensor, *, top_entropy_quantile: float) -> float:
    """Return the entropy from which on tokens stay in the policy loss: ``keep = entropies >= threshold``.

    Beyond the 80/20 rule, arXiv 2506.01939. Between two tokens the quantile is interpolated, as torch.quantile does.

    Args:
        entropies_N: Of all sampled tokens of the step, in nats.
        top_entropy_quantile: The share that is kept, 0 to 1; 0 keeps the token of highest entropy.
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
    """The coefficient of the entropy bonus, constant or adaptive. One a run, the same on every rank."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._coef = config.entropy_coef
        self._last_entropy = math.inf

    @property
    def applied_coef(self) -> float:
        """The coefficient for the loss of the coming step."""
        if self._config.use_adaptive_entropy and self._last_entropy > self._config.entropy_target:
            return 0.0
        return self._coef

    def update(self, stats: TokenStats) -> None:
        """Take in a finished step. ``stats`` is of the whole step, over all ranks."""
        if not self._config.use_adaptive_entropy or not stats.num_bonus_tokens:
            return
        self._last_entropy = stats.bonus_entropy_sum / stats.num_bonus_tokens
        if self._last_entropy <= self._config.entropy_target:
            self._coef = min(self._coef + self._config.entropy_coef_delta, self._config.entropy_coef_max)
        else:
            self._coef = max(self._coef - self._config.entropy_coef_delta, self._config.entropy_coef_min)

    def metrics(self) -> dict[str, float]:
        """Return ``entropy_coef`` as it stands for the next step; nothing in a run without an entropy bonus."""
        has_bonus = self._config.entropy_coef != 0 or self._config.use_adaptive_entropy
        return {"entropy_coef": self._coef} if has_bonus else {}

    def to_json(self) -> dict[str, float | None]:
        """Return the state for a checkpoint, fit for JSON."""
        return {
            "entropy_coef": self._coef,
            "last_entropy": self._last_entropy if math.isfinite(self._last_entropy) else None,
        }

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Go on where the control that wrote `to_json` was. Without adaptive control the config's word stands.

        Raises:
            HeadraceError: The state is not one that `to_json` wrote.
        """
        coef, last_entropy = state.get("entropy_coef"), state.get("last_entropy")
        if not isinstance(coef, int | float) or not isinstance(last_entropy, int | float | None):
            raise HeadraceError(
                f"the checkpoint's entropy control is damaged: {dict(state)!r}; use an older checkpoint"
            )
        if self._config.use_adaptive_entropy:
            self._coef = float(coef)
            self._last_entropy = math.inf if last_entropy is None else float(last_entropy)
