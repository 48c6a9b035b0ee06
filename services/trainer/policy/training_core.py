"""What the training loop drives: a core alone (policy_core.py), or a core that leads others (lead_core.py)."""

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from services.trainer.policy.core_results import AccumulateStats, Scores, StepStats, TokenArray
from services.trainer.policy.microbatches import TrainRow

if TYPE_CHECKING:
    from services.trainer.objective.loss import StepTotals


class TrainingCore(Protocol):
    """A policy that learns. What each method promises stands at policy_core.PolicyCore."""

    @property
    def policy_version(self) -> int:
        """Optimizer steps contained in the weights."""
        ...

    @property
    def num_ranks(self) -> int:
        """How many take part in each call."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids that the policy takes and gives are below it."""
        ...

    def score(self, rows: Sequence[TrainRow]) -> list[Scores]:
        """Return what policy and reference make of each row, as they are now."""
        ...

    def probe(self, token_ids: Sequence[int]) -> TokenArray:
        """Return the logprob of every token but the first, at temperature 1."""
        ...

    def accumulate(
        self,
        rows: Sequence[TrainRow],
        *,
        totals: "StepTotals | None" = None,
        per_token: bool | Collection[int] = False,
    ) -> AccumulateStats:
        """Add the gradients of the rows' part of the loss to those of the coming step."""
        ...

    def step(self) -> StepStats:
        """Clip the accumulated gradients, and take one optimizer step."""
        ...

    def grad_norm(self) -> float:
        """Return the norm of the gradients accumulated for the coming step."""
        ...

    def discard(self) -> None:
        """Forget everything accumulated for the coming step."""
        ...

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """Yield the weights to push, by name, in fixed order."""
        ...

    def begin_save(self, directory: Path, tokenizer: Any | None) -> "Future[None]":
        """Copy everything that `load_state` needs, and return a future of its being in the directory."""
        ...

    def load_state(self, directory: Path) -> None:
        """Become, bit for bit, the core that wrote the directory."""
        ...
