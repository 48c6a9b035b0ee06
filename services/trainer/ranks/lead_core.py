"""Makes several training ranks look like one PolicyCore to the training loop. Runs on rank 0, which leads the others.

    training loop --accumulate(rows)--> LeadCore --its rows--> PolicyCore of rank 0 --+
                                            |                                         +-- meet in every layer
                                            +-- their rows, gloo --> follower.py -----+
                                            <-- done, or why not -------+

Rows are split over the ranks by tokens (rank_plan.py). Results are returned in the order in which the rows were given.
Weights for a push are gathered one bucket per command, and sent to the generators between commands. A push that is
given up just requests no more buckets.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from services.trainer.objective.loss import StepTotals
from services.trainer.policy.core_results import AccumulateStats, PerTokenArrays, Scores, StepStats, TokenArray
from services.trainer.policy.microbatches import TrainRow, needs_backward
from services.trainer.policy.policy_core import PolicyCore
from services.trainer.policy.rank_plan import RankPlan, Slot, plan_passes
from services.trainer.policy.ranks import RankLostError
from services.trainer.ranks.lead import Lead
from services.trainer.ranks.rank_commands import (
    Accumulate,
    BeginFrom,
    BeginSave,
    Build,
    Command,
    Discard,
    GatherBucket,
    GradNorm,
    LoadState,
    PackedRow,
    Score,
    ScoreProbe,
    Step,
    TakeWeights,
    pack_plan,
    unpack_arrays,
)
from services.trainer.ranks.weight_buckets import BUCKET_BYTES, WeightBuckets
from shared.errors import PushError
from shared.run_options.run_config import RunConfig


class LeadCore:
    """The model in training over several ranks, with PolicyCore's interface. Each call is executed on all ranks.

    Args:
        config: The run's settings.
        model_dir_or_id: Directory or hub id of the initial weights.
        total_steps: Optimizer steps of the whole run, for the learning-rate schedule.
        lead: Sends commands to the other ranks.
        bucket_bytes: Size at which a bucket of gathered weights is full, in bytes.

    Raises:
        UserError: The model cannot be used; the message says why.
        RankLostError: A rank is gone.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        model_dir_or_id: str,
        total_steps: int,
        lead: Lead,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._config = config
        self._lead = lead
        ranks = lead.ranks
        build = Build(config.model_dump_json().encode(), model_dir_or_id, total_steps, bucket_bytes)
        self._core, _ = lead.together(
            [build] * ranks.size,
            lambda: PolicyCore(
                config, model_dir_or_id=model_dir_or_id, total_steps=total_steps, device=ranks.device, ranks=ranks
            ),
        )
        self._buckets = WeightBuckets(self._core.lm, dtype=self._core.dtype, bucket_bytes=bucket_bytes)
        self.named_weights = GatheredWeights(self._buckets, self._gather)

    @property
    def policy_version(self) -> int:
        """Optimizer steps contained in the weights, which are the same on all ranks."""
        return self._core.policy_version

    @property
    def num_ranks(self) -> int:
        """Number of training ranks that take part in each call."""
        return self._lead.num_ranks

    @property
    def vocab_size(self) -> int:
        """Upper bound (exclusive) of the token ids that the policy accepts and samples."""
        return self._core.vocab_size

    def score(self, rows: Sequence[TrainRow]) -> list[Scores]:
        """Split the rows over the ranks, and return each row's logprobs and entropies, in the order of the rows."""
        shares = self._split(rows, learns=False)
        own, answers = self._lead.together(
            [Score(share.packed_rows(), pack_plan(share.plan)) for share in shares],
            lambda: self._core.score(shares[0].rows, plan=shares[0].plan),
        )
        merged = {shares[0].indices[index]: scores for index, scores in enumerate(own)}
        for share, answer in zip(shares[1:], answers, strict=True):
            for index, arrays in unpack_arrays(answer.arrays).items():
                trainer_logprobs, entropies, reference_logprobs = arrays
                if trainer_logprobs is None or entropies is None:
                    raise RankLostError(
                        "a training rank scored a row without logprobs; it runs another headrace version"
                    )
                merged[share.indices[index]] = Scores(trainer_logprobs, entropies, reference_logprobs)
        return [merged[index] for index in range(len(rows))]

    def probe(self, token_ids: Sequence[int]) -> TokenArray:
        """Return the logprob of every token but the first, at temperature 1. All ranks compute the whole prompt."""
        commands: list[Command] = [ScoreProbe(list(token_ids))] * self._lead.num_ranks
        logprobs, _ = self._lead.together(commands, lambda: self._core.probe(token_ids))
        return logprobs

    def accumulate(
        self,
        rows: Sequence[TrainRow],
        *,
        totals: StepTotals | None = None,
        per_token: bool | Collection[int] = False,
    ) -> AccumulateStats:
        """Split the rows over the ranks; each rank adds the gradients of its rows to the gradients of the next step.

        An unfinished iteration over ``named_weights`` ends with a PushError. Arguments and errors are as in PolicyCore.
        """
        self.named_weights.void()
        shares = self._split(rows, learns=True)
        wanted = set(range(len(rows))) if per_token is True else set(per_token or ())
        divisors = None if totals is None else dataclasses.asdict(totals)
        arrays_of = [[local for local, index in enumerate(share.indices) if index in wanted] for share in shares]
        stats, answers = self._lead.together(
            [
                Accumulate(share.packed_rows(), pack_plan(share.plan), divisors, chosen)
                for share, chosen in zip(shares, arrays_of, strict=True)
            ],
            lambda: self._core.accumulate(shares[0].rows, totals=totals, plan=shares[0].plan, per_token=arrays_of[0]),
            row_indices=[share.indices for share in shares],
        )
        merged = {shares[0].indices[index]: arrays for index, arrays in stats.per_token.items()}
        for share, answer in zip(shares[1:], answers, strict=True):
            for index, (logprobs, ratio, entropy) in unpack_arrays(answer.arrays).items():
                if logprobs is None or ratio is None or entropy is None:
                    raise RankLostError("a training rank left out arrays of a row; it runs another headrace version")
                row = share.indices[index]
                merged[row] = PerTokenArrays(logprobs, ratio, entropy, advantage=rows[row].advantage)
        return dataclasses.replace(stats, per_token=merged)

    def step(self, total_steps: int | None = None) -> StepStats:
        """Take a step on all ranks (see `PolicyCore.step`). Iterations over ``named_weights`` end with a PushError."""
        self.named_weights.void()
        commands: list[Command] = [Step(total_steps)] * self._lead.num_ranks
        stats, _ = self._lead.together(commands, lambda: self._core.step(total_steps))
        return stats

    def grad_norm(self) -> float:
        """Return the norm, over all ranks, of the gradients accumulated for the next step."""
        norm, _ = self._lead.together([GradNorm()] * self._lead.num_ranks, self._core.grad_norm)
        return norm

    def discard(self) -> None:
        """Discard, on all ranks, the gradients and statistics accumulated for the next step."""
        self._lead.together([Discard()] * self._lead.num_ranks, self._core.discard)

    def begin_save(self, directory: Path, tokenizer: Any | None) -> "Future[None]":
        """Have each rank copy its part of the state, and return a future that is done when all have written theirs."""
        commands: list[Command] = [BeginSave(str(directory))] * self._lead.num_ranks
        written, _ = self._lead.together(commands, lambda: self._core.begin_save(directory, tokenizer))
        return written

    def load_state(self, directory: Path) -> None:
        """Restore the state of a checkpoint on all ranks, bit for bit."""
        self.named_weights.void()
        commands: list[Command] = [LoadState(str(directory))] * self._lead.num_ranks
        self._lead.together(commands, lambda: self._core.load_state(directory))

    def begin_from(self, directory: Path) -> None:
        """Start all ranks at policy version 0 with the state of another run's checkpoint."""
        self.named_weights.void()
        commands: list[Command] = [BeginFrom(str(directory))] * self._lead.num_ranks
        self._lead.together(commands, lambda: self._core.begin_from(directory))

    def take_weights(self, directory: Path) -> None:
        """Load only the weights in the directory, on all ranks."""
        self.named_weights.void()
        commands: list[Command] = [TakeWeights(str(directory))] * self._lead.num_ranks
        self._lead.together(commands, lambda: self._core.take_weights(directory))

    def _gather(self, bucket: int) -> dict[str, Tensor]:
        tensors, _ = self._lead.together(
            [GatherBucket(bucket)] * self._lead.num_ranks, lambda: self._buckets.gather(bucket)
        )
        return tensors

    def _split(self, rows: Sequence[TrainRow], *, learns: bool) -> list["_Share"]:
        plans = plan_passes(
            [row.token_ids.size for row in rows],
            [learns and needs_backward(row, self._config, has_router_loss=self._core.has_router_loss) for row in rows],
            num_ranks=self._lead.num_ranks,
            max_tokens=self._config.max_tokens_per_microbatch,
            max_rows=None if self._core.packs else 1,
        )
        return [_Share.of(rows, plan) for plan in plans]


class GatheredWeights:
    """Iterates over the weights to push, and gathers them from all ranks meanwhile. Each call starts a new iteration.

    If another iteration, `accumulate`, a step or a load begins, an earlier iteration ends with a PushError.
    """

    def __init__(self, buckets: WeightBuckets, gather: Callable[[int], dict[str, Tensor]]) -> None:
        self._buckets = buckets
        self._gather = gather
        self._reading = 0

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        """Start a new iteration: yield the name and the whole tensor of each weight, gathered bucket by bucket."""
        self._reading += 1
        return self._read(self._reading)

    def described(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the same names, dtypes and shapes with tensors that have no content. Gathers nothing."""
        return self._buckets.described()

    def void(self) -> None:
        """Make an unfinished iteration raise PushError before its next bucket."""
        self._reading += 1

    def _read(self, reading: int) -> Iterator[tuple[str, Tensor]]:
        for bucket in range(len(self._buckets)):
            if reading != self._reading:
                raise PushError("this reading of the weights was given up")
            yield from self._gather(bucket).items()


@dataclasses.dataclass(frozen=True)
class _Share:
    """The rows that one rank computes in a call, and its passes over them."""

    indices: tuple[int, ...]
    """Indices of its rows among all rows."""
    rows: list[TrainRow]
    plan: RankPlan
    """The plan, with indices into ``rows``."""

    @classmethod
    def of(cls, rows: Sequence[TrainRow], plan: RankPlan) -> "_Share":
        indices = tuple(index for slot in plan for index in slot.row_indices)
        place = {index: local for local, index in enumerate(indices)}
        local_plan = tuple(
            Slot(tuple(place[index] for index in slot.row_indices), slot.needs_backward) for slot in plan
        )
        return cls(indices, [rows[index] for index in indices], local_plan)

    def packed_rows(self) -> list[PackedRow]:
        return [PackedRow.of(row) for row in self.rows]
