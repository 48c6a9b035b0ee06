"""Return types of PolicyCore, the model in training: logprobs of rows, loss statistics, step statistics."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.trainer.objective.token_stats import TokenStats
from shared.errors import HeadraceError

TokenArray = npt.NDArray[np.float32]
"""One number per sampled token of a row."""


class NonFiniteError(HeadraceError):
    """The loss or its gradient is NaN or infinite. The weights are as they were before the step.

    All training ranks raise it in the same call.
    """

    def __init__(self, message: str, *, row_indices: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.row_indices = row_indices
        """Indices of the faulty rows, among all rows if LeadCore raised it, else this rank's; empty if unknown."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Logprobs under policy and reference, and entropies, at each sampled token of one row, in nats."""

    trainer_logprobs: TokenArray
    entropies: TokenArray
    reference_logprobs: TokenArray | None
    """None in a run without a reference model."""


@dataclass(frozen=True, eq=False)
class PerTokenArrays:
    """Logprob, importance ratio, entropy and advantage at each sampled token of one row, for the rollout log."""

    trainer_logprobs: TokenArray
    importance_ratio: TokenArray
    """Ratio of trainer to generator, before truncation or masking."""
    entropy: TokenArray
    advantage: float | TokenArray
    """One number for all tokens, or one per token."""


@dataclass(frozen=True)
class AccumulateStats:
    """Loss statistics and counts of one `accumulate` over all ranks. PolicyCore's ``per_token`` has one rank's rows."""

    token_stats: TokenStats
    num_rows: int
    num_passes: int
    """Forward passes; every rank makes the same number, some of them maybe without rows."""
    num_pass_tokens: int
    """Tokens that went through the model."""
    per_token: Mapping[int, PerTokenArrays] = field(default_factory=dict[int, PerTokenArrays])
    """Arrays of the requested rows, by row index: of this rank from PolicyCore, of all ranks from LeadCore."""


@dataclass(frozen=True)
class StepStats:
    """Learning rate, gradient norm and loss statistics of one optimizer step, over all ranks."""

    policy_version: int
    """The version after the step."""
    learning_rate: float
    grad_norm: float
    """The norm before clipping."""
    token_stats: TokenStats
    """Statistics of all rows accumulated for this step."""
    entropy_metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    def metrics(self) -> dict[str, float]:
        """Return the metrics to log, under TRL's names where TRL has one."""
        head = {"learning_rate": self.learning_rate, "grad_norm": self.grad_norm}
        return {**head, **self.token_stats.metrics(), **self.entropy_metrics}
