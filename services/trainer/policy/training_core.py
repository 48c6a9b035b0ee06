"""The interface of the training loop to a single core (policy_core.py) or the lead of several (lead_core.py)."""

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from services.trainer.policy.core_results import AccumulateStats, Scores, StepStats, TokenArray
from services.trainer.policy.microbatches import TrainRow

if TYPE_CHECKING:
    from services.trainer.objective.loss import StepTotals


class TrainingCore(Protocol):
    """A policy in training. policy_core.PolicyCore documents each method."""

    @property
    def policy_version(self) -> int:
        """Optimizer steps contained in the weights."""
        ...

    @property
    def num_ranks(self) -> int:
        """Number of training ranks in each call."""
        ...

    @property
    def vocab_size(self) -> int:
        """Upper bound (exclusive) of the token ids that the policy accepts and samples."""
        ...

    def score(self, rows: Sequence[TrainRow]) -> list[Scores]:
        """Return the present logprobs of policy and reference, and the policy's entropies, for each row."""
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
        """Add the gradients of the rows' part of the loss to the gradients of the next step."""
        ...

    def step(self, total_steps: int | None = None) -> StepStats:
        """Clip the accumulated gradients, and take one optimizer step of a run that has ``total_steps`` from now on."""
        ...

    def grad_norm(self) -> float:
        """Return the norm of the gradients accumulated for the next step."""
        ...

    def discard(self) -> None:
        """Discard everything accumulated for the next step."""
        ...

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """Yield the weights to push, by name, in fixed order."""
        ...

    def begin_save(self, directory: Path, tokenizer: Any | None) -> "Future[None]":
        """Copy the state that `load_state` needs, and return a future that is done when it is in the directory."""
        ...

    def load_state(self, directory: Path) -> None:
        """Restore, bit for bit, the state of the core that wrote the directory."""
        ...

    def begin_from(self, directory: Path) -> None:
        """Take over the state of the core that wrote the directory, as policy version 0 of this run."""
        ...

    def take_weights(self, directory: Path) -> None:
        """Take over only the weights in the directory."""
        ...
