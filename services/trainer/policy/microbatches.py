"""Training rows, and the arrays of one forward pass over several of them, end to end without padding. Pure numpy.

    rows --rank_plan.py--> slots: which rows in which pass --pack_rows--> | row | row row | ...

How rows are packed changes nothing that is trained: the loss of a step is a sum over its passes, already normalised.

    N  tokens in a pass       M  sampled ones among them       B  rows in it       T  sampled tokens of a row, at most
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shared.arrays import Ids, Logprobs, Mask
from shared.run_config import RunConfig

Advantages = npt.NDArray[np.float32]
"""One for all sampled tokens of a row, shape (1,), or one for each of them."""


@dataclass(frozen=True, eq=False)
class TrainRow:
    """One rollout as the loss sees it.

    ``loss_mask`` is 1 exactly on the tokens the policy sampled; every ``*_logprobs`` has one entry for each of those.

    Raises:
        ValueError: The arrays contradict each other, or the first token, which nothing predicts, is marked as sampled.
    """

    token_ids: Ids
    loss_mask: Mask
    generator_logprobs: Logprobs
    """NaN where the generator could not tell: nothing is corrected there."""
    advantage: float | Advantages
    """Of every sampled token alike, or of each."""
    old_logprobs: Logprobs | None = None
    """Of the proximal policy, around which the loss clips; None: the policy in training itself."""
    reference_logprobs: Logprobs | None = None
    """Of the reference model; needed when ``beta`` is not 0."""

    def __post_init__(self) -> None:
        num_sampled = int(self.loss_mask.sum())
        if self.loss_mask.shape != self.token_ids.shape or self.generator_logprobs.shape != (num_sampled,):
            raise ValueError(
                f"{self.token_ids.size} tokens, {self.loss_mask.size} mask entries of which {num_sampled} are 1, and "
                f"{self.generator_logprobs.size} logprobs"
            )
        if num_sampled == 0 or self.loss_mask[0]:
            raise ValueError("a row needs a sampled token, and a token before the first sampled one")
        for name in ("old_logprobs", "reference_logprobs"):
            logprobs: Logprobs | None = getattr(self, name)
            if logprobs is not None and logprobs.shape != (num_sampled,):
                raise ValueError(f"{num_sampled} sampled tokens and {logprobs.size} {name}")
        if self.advantages.shape not in ((1,), (num_sampled,)):
            raise ValueError(f"{num_sampled} sampled tokens and {self.advantages.size} advantages")

    @property
    def advantages(self) -> Advantages:
        """One, or one for each sampled token."""
        with np.errstate(over="ignore"):
            return np.atleast_1d(np.asarray(self.advantage, dtype=np.float32))

    @property
    def num_sampled(self) -> int:
        """Number of tokens in the loss."""
        return int(self.generator_logprobs.size)


def needs_backward(row: TrainRow, config: RunConfig, *, has_router_loss: bool) -> bool:
    """Return whether the row has a gradient.

    Where all advantages are 0 there is none but from the KL term, the entropy bonus and the load-balancing loss of
    experts.
    """
    has_other_terms = config.beta != 0 or config.entropy_coef != 0 or config.use_adaptive_entropy or has_router_loss
    return has_other_terms or bool((row.advantages != 0).any())


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Arrays of one forward pass over packed rows, and where its sampled tokens stand in the loss.

    Row ``b`` of the loss is ``row_indices[b]`` of the rows given; its sampled tokens are ``[b, :n_b]``.
    """

    row_indices: tuple[int, ...]
    input_ids_N: npt.NDArray[np.int64]
    position_ids_N: npt.NDArray[np.int64]
    """From 0 in every row."""
    cu_seqlens: tuple[int, ...]
    """Where each row begins, and at last where the last one ends."""
    sampled_positions_M: npt.NDArray[np.int64]
    """Positions whose logits predict a sampled token: those before the sampled tokens."""
    targets_M: npt.NDArray[np.int64]
    """The sampled tokens."""
    mask_BT: npt.NDArray[np.bool_]
    """Where the loss has a token; in C order these are the M sampled ones."""

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return int(self.input_ids_N.size)


def pack_rows(rows: Sequence[TrainRow], row_indices: tuple[int, ...]) -> Microbatch:
    """Return the packed arrays of ``rows[i] for i in row_indices``; of none, those of a dummy of two tokens."""
    if not row_indices:
        dummy = TrainRow(
            token_ids=np.zeros(2, dtype=np.int32),
            loss_mask=np.array([0, 1], dtype=np.uint8),
            generator_logprobs=np.zeros(1, dtype=np.float32),
            advantage=0.0,
        )
        return replace(pack_rows([dummy], (0,)), row_indices=())
    chosen = [rows[index] for index in row_indices]
    lengths = [row.token_ids.size for row in chosen]
    ends = np.cumsum(lengths)
    input_ids_N = np.concatenate([row.token_ids for row in chosen]).astype(np.int64)
    sampled_M = np.flatnonzero(np.concatenate([row.loss_mask for row in chosen]))
    counts_B = np.array([row.num_sampled for row in chosen], dtype=np.int64)
    return Microbatch(
        row_indices=row_indices,
        input_ids_N=input_ids_N,
        position_ids_N=np.concatenate([np.arange(length) for length in lengths]),
        cu_seqlens=(0, *(int(end) for end in ends)),
        # A row's first token is never a sampled one, so the position before is of the same row.
        sampled_positions_M=sampled_M - 1,
        targets_M=input_ids_N[sampled_M],
        mask_BT=np.less(np.arange(int(counts_B.max()))[None, :], counts_B[:, None]),
    )
