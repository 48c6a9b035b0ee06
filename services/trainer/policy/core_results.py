"""What the calls of the trainer's core give back (policy_core.py)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.trainer.objective.token_stats import TokenStats
from shared.errors import HeadraceError

TokenArray = npt.NDArray[np.float32]
"""One number for each sampled token of a row."""


class NonFiniteError(HeadraceError):
    """The loss or its gradient is not a finite number. The weights are as they were before the step.

    Raised on every rank alike.
    """

    def __init__(self, message: str, *, row_indices: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.row_indices = row_indices
        """Rows at fault, of those this rank was given; none if they are not known, or another rank's."""


@dataclass(frozen=True, eq=False)
class Scores:
    """What the models make of one row's sampled tokens."""

    trainer_logprobs: TokenArray
    entropies: TokenArray
    reference_logprobs: TokenArray | None
    """None in a run without a reference model."""


@dataclass(frozen=True, eq=False)
class PerTokenArrays:
    """What the trainer saw at each sampled token of one row."""

    trainer_logprobs: TokenArray
    importance_ratio: TokenArray
    """Between trainer and generator, before anything is cut."""
    entropy: TokenArray
    advantage: float | TokenArray
    """Of every token alike, or of each."""


@dataclass(frozen=True)
class AccumulateStats:
    """What one call of `PolicyCore.accumulate` did, on all ranks together."""

    token_stats: TokenStats
    num_rows: int
    num_passes: int
    """Forward passes of this rank; they are as many on the others."""
    num_pass_tokens: int
    """Tokens that went through the model."""
    per_token: Mapping[int, PerTokenArrays] = field(default_factory=dict[int, PerTokenArrays])
    """By row index, of the rows asked for; this rank's alone."""


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step did, on all ranks together."""

    policy_version: int
    """After the step."""
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    token_stats: TokenStats
    """Of all rows accumulated for this step."""
    entropy_metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log, under TRL's names where TRL has one."""
        head = {"learning_rate": self.learning_rate, "grad_norm": self.grad_norm}
        return {**head, **self.token_stats.metrics(), **self.entropy_metrics}
