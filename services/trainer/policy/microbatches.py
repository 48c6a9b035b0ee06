"""Training rows, and the arrays of a forward pass over several rows packed end to end without padding. Pure numpy.

    rows --rank_plan.py--> slots: which rows in which pass --pack_rows--> | row | row row | ...

Packing does not change what is trained: a step's loss is a sum over its passes, already normalised.

    N  tokens in a pass       M  sampled tokens of a pass       B  rows in a pass       T  most sampled tokens of a row
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shared.arrays import Ids, Logprobs, Mask
from shared.run_options.run_config import RunConfig

Advantages = npt.NDArray[np.float32]
"""One number for all sampled tokens of a row, shape (1,), or one per sampled token."""


@dataclass(frozen=True, eq=False)
class TrainRow:
    """One token sequence of a rollout, prompt included, with the values that its loss needs.

    ``loss_mask`` is 1 exactly on the tokens that the policy sampled. Every ``*_logprobs`` has one entry per such token.

    Raises:
        ValueError: The arrays' sizes do not match, no token is marked as sampled, or the first is: nothing predicts it.
    """

    token_ids: Ids
    loss_mask: Mask
    generator_logprobs: Logprobs
    """NaN where the generator recorded no logprob; these tokens get no correction."""
    advantage: float | Advantages
    """One number for all sampled tokens, or one per token."""
    share: float = 1.0
    """The row's share of the sampled tokens of its rollout."""
    old_logprobs: Logprobs | None = None
    """Logprobs of the proximal policy, around which the loss clips; None means the policy in training."""
    reference_logprobs: Logprobs | None = None
    """Logprobs of the reference model; needed when ``beta`` is not 0."""

    def __post_init__(self) -> None:
        num_sampled = int(self.loss_mask.sum())
        if self.loss_mask.shape != self.token_ids.shape or self.generator_logprobs.shape != (num_sampled,):
            raise ValueError(
                f"the row's arrays do not match: {self.token_ids.size} tokens, {self.loss_mask.size} mask entries of "
                f"which {num_sampled} are 1, and "
                f"{self.generator_logprobs.size} logprobs"
            )
        if num_sampled == 0 or self.loss_mask[0]:
            raise ValueError("a row needs a sampled token, and a token before the first sampled one")
        for name in ("old_logprobs", "reference_logprobs"):
            logprobs: Logprobs | None = getattr(self, name)
            if logprobs is not None and logprobs.shape != (num_sampled,):
                raise ValueError(
                    f"the row's arrays do not match: {num_sampled} sampled tokens and {logprobs.size} {name}"
                )
        if self.advantages.shape not in ((1,), (num_sampled,)):
            raise ValueError(
                f"the row's arrays do not match: {num_sampled} sampled tokens and {self.advantages.size} advantages"
            )

    @property
    def advantages(self) -> Advantages:
        """An array with one advantage, or one per sampled token."""
        with np.errstate(over="ignore"):
            return np.atleast_1d(np.asarray(self.advantage, dtype=np.float32))

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens, all of which are in the loss."""
        return int(self.generator_logprobs.size)


def needs_backward(row: TrainRow, config: RunConfig, *, has_router_loss: bool) -> bool:
    """Return whether the row has a gradient.

    If all advantages are 0, only the KL term, the entropy bonus and the load-balancing loss of experts have one.
    """
    has_other_terms = config.beta != 0 or config.entropy_coef != 0 or config.use_adaptive_entropy or has_router_loss
    return has_other_terms or bool((row.advantages != 0).any())


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Arrays of one forward pass over packed rows, and the places of their sampled tokens in the loss.

    Row ``b`` of the loss is the training row ``row_indices[b]``. Its ``n`` sampled tokens are at ``[b, :n]``.
    """

    row_indices: tuple[int, ...]
    input_ids_N: npt.NDArray[np.int64]
    position_ids_N: npt.NDArray[np.int64]
    """Counted from 0 in every row."""
    cu_seqlens: tuple[int, ...]
    """Start of each row, and the end of the last one."""
    sampled_positions_M: npt.NDArray[np.int64]
    """Positions whose logits predict a sampled token: the positions before the sampled tokens."""
    targets_M: npt.NDArray[np.int64]
    """The sampled tokens."""
    mask_BT: npt.NDArray[np.bool_]
    """True where the loss has a token. In C order these are the M sampled tokens."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that go through the model, including prompts."""
        return int(self.input_ids_N.size)


def pack_rows(rows: Sequence[TrainRow], row_indices: tuple[int, ...]) -> Microbatch:
    """Pack ``rows[i] for i in row_indices`` end to end, or a dummy row of two tokens if no index is given."""
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
        # The first token of a row is never sampled, so the position before a sampled token is in the same row.
        sampled_positions_M=sampled_M - 1,
        targets_M=input_ids_N[sampled_M],
        mask_BT=np.less(np.arange(int(counts_B.max()))[None, :], counts_B[:, None]),
    )
