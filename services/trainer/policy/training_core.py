"""The training loop's interface to the model in training, on one rank (policy_core.py) or several (lead_core.py)."""

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from services.trainer.policy.core_results import AccumulateStats, Scores, StepStats, TokenArray
from services.trainer.policy.microbatches import TrainRow

if TYPE_CHECKING:
    from services.trainer.objective.loss import StepTotals


class TrainingCore(Protocol):
    """The model in training, as the training loop calls it. policy_core.PolicyCore documents arguments and errors."""

    @property
    def policy_version(self) -> int:
        """Optimizer steps contained in the weights."""
        ...

    @property
    def num_ranks(self) -> int:
        """Number of training ranks that take part in each call."""
        ...

    @property
    def vocab_size(self) -> int:
        """Upper bound (exclusive) of the token ids that the policy accepts and samples."""
        ...

    def score(self, rows: Sequence[TrainRow]) -> list[Scores]:
        """Return each row's logprobs under policy and reference, and entropies, with the current weights."""
        ...

    def probe(self, token_ids: Sequence[int]) -> TokenArray:
        """Return the logprob of every token but the first, at temperature 1, with the current weights."""
        ...

    def accumulate(
        self,
        rows: Sequence[TrainRow],
        *,
        totals: "StepTotals | None" = None,
        per_token: bool | Collection[int] = False,
    ) -> AccumulateStats:
        """Compute the loss of the rows, and add its gradients to the gradients of the next optimizer step."""
        ...

    def step(self, total_steps: int | None = None) -> StepStats:
        """Clip the gradients and take an optimizer step. ``total_steps``: steps of the whole run; None if unchanged."""
        ...

    def grad_norm(self) -> float:
        """Return the norm of the gradients accumulated for the next step."""
        ...

    def discard(self) -> None:
        """Discard the gradients and statistics accumulated for the next step."""
        ...

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """Yield the name and the tensor of each weight to push, in fixed order."""
        ...

    def begin_save(self, directory: Path, tokenizer: Any | None) -> "Future[None]":
        """Copy the state that `load_state` needs, and return a future that is done when all ranks have written it."""
        ...

    def load_state(self, directory: Path) -> None:
        """Restore weights, optimizer, schedule and random state from a checkpoint directory, bit for bit."""
        ...

    def begin_from(self, directory: Path) -> None:
        """Start at policy version 0 with the weights, optimizer and schedule of another run's checkpoint."""
        ...

    def take_weights(self, directory: Path) -> None:
        """Load only the weights in the directory, without optimizer and schedule."""
        ...
