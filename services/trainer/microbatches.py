"""Packs training rows into right-padded microbatches under a token budget. Pure numpy.

    rows, any order --longest first--> [ row row row ] [ row row row row row ] ...    padded tokens <= max_tokens

Rows of similar length share a microbatch, so that little of it is padding. How rows are packed changes nothing that is
trained: the loss is a sum over tokens (loss.py).

    B  sequences in a microbatch       T  tokens of its longest       K  logit positions kept
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.arrays import Ids, Logprobs, Mask


@dataclass(frozen=True, eq=False)
class TrainRow:
    """One rollout as the loss sees it.

    ``loss_mask`` is 1 exactly on the tokens the policy sampled; ``generator_logprobs`` has one entry for each of those.

    Raises:
        ValueError: The arrays contradict each other, or the first token, which nothing predicts, is marked as sampled.
    """

    token_ids: Ids
    loss_mask: Mask
    generator_logprobs: Logprobs
    advantage: float

    def __post_init__(self) -> None:
        num_sampled = int(self.loss_mask.sum())
        if self.loss_mask.shape != self.token_ids.shape or self.generator_logprobs.shape != (num_sampled,):
            raise ValueError(
                f"{self.token_ids.size} tokens, {self.loss_mask.size} mask entries of which {num_sampled} are 1, and "
                f"{self.generator_logprobs.size} logprobs"
            )
        if num_sampled == 0 or self.loss_mask[0]:
            raise ValueError("a row needs a sampled token, and a token before the first sampled one")

    @property
    def num_sampled(self) -> int:
        """Number of tokens in the loss."""
        return int(self.generator_logprobs.size)


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Arrays of one forward pass. ``row_indices`` says which of the given rows they are.

    Logits are needed at the ``kept_positions_K`` alone: one before each token that any row sampled. ``targets_BK`` are
    the tokens that follow, and ``mask_BK`` is True where the row itself sampled it.
    """

    row_indices: tuple[int, ...]
    input_ids_BT: npt.NDArray[np.int64]
    attention_mask_BT: npt.NDArray[np.int64]
    kept_positions_K: npt.NDArray[np.int64]
    targets_BK: npt.NDArray[np.int64]
    mask_BK: npt.NDArray[np.bool_]
    generator_logprobs_BK: npt.NDArray[np.float32]
    advantages_B: npt.NDArray[np.float32]


def pack(lengths: Sequence[int], *, max_tokens: int) -> list[tuple[int, ...]]:
    """Return row indices for each microbatch, longest rows first, so that rows times longest is at most ``max_tokens``.

    A row that is longer than the budget gets a microbatch of its own.
    """
    microbatches: list[tuple[int, ...]] = []
    current: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if current and (len(current) + 1) * lengths[current[0]] > max_tokens:
            microbatches.append(tuple(current))
            current = []
        current.append(index)
    if current:
        microbatches.append(tuple(current))
    return microbatches


def make_microbatch(rows: Sequence[TrainRow], row_indices: tuple[int, ...]) -> Microbatch:
    """Return the padded arrays of ``rows[i] for i in row_indices``, which are sorted longest first."""
    chosen = [rows[index] for index in row_indices]
    shape = (len(chosen), max(row.token_ids.size for row in chosen))
    input_ids_BT = np.zeros(shape, dtype=np.int64)
    attention_mask_BT = np.zeros(shape, dtype=np.int64)
    mask_BT = np.zeros(shape, dtype=np.bool_)
    generator_logprobs_BT = np.zeros(shape, dtype=np.float32)
    for b, row in enumerate(chosen):
        length = row.token_ids.size
        is_sampled = row.loss_mask == 1
        input_ids_BT[b, :length] = row.token_ids
        attention_mask_BT[b, :length] = 1
        mask_BT[b, :length] = is_sampled
        generator_logprobs_BT[b, :length][is_sampled] = row.generator_logprobs
    # Logits at position t predict the token at t + 1.
    sampled_positions_K = np.flatnonzero(mask_BT.any(axis=0))
    return Microbatch(
        row_indices=row_indices,
        input_ids_BT=input_ids_BT,
        attention_mask_BT=attention_mask_BT,
        kept_positions_K=sampled_positions_K - 1,
        targets_BK=input_ids_BT[:, sampled_positions_K],
        mask_BK=mask_BT[:, sampled_positions_K],
        generator_logprobs_BK=generator_logprobs_BT[:, sampled_positions_K],
        advantages_B=np.array([row.advantage for row in chosen], dtype=np.float32),
    )
