import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.microbatches import TrainRow, make_microbatch, pack


def row(
    token_ids: list[int], loss_mask: list[int], generator_logprobs: list[float], advantage: float = 1.0
) -> TrainRow:
    return TrainRow(
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=np.array(loss_mask, dtype=np.uint8),
        generator_logprobs=np.array(generator_logprobs, dtype=np.float32),
        advantage=advantage,
    )


def test_rows_are_packed_longest_first_under_the_budget_of_padded_tokens() -> None:
    # 6 fits twice into 12; then 4 * 3 = 12; the last row is left over.
    assert pack([2, 6, 4, 3, 6, 4], max_tokens=12) == [(1, 4), (2, 5, 3), (0,)]


def test_a_row_longer_than_the_budget_goes_alone() -> None:
    assert pack([5, 20, 5], max_tokens=10) == [(1,), (0, 2)]


def test_no_rows_make_no_microbatch() -> None:
    assert pack([], max_tokens=10) == []


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 200))
def test_every_row_is_packed_once_and_no_microbatch_is_over_the_budget(lengths: list[int], max_tokens: int) -> None:
    packed = pack(lengths, max_tokens=max_tokens)
    assert sorted(index for indices in packed for index in indices) == list(range(len(lengths)))
    assert all(len(indices) * max(lengths[index] for index in indices) <= max_tokens for indices in packed)


def test_a_microbatch_is_padded_on_the_right_and_keeps_the_logits_before_sampled_tokens_alone() -> None:
    # Row 0 samples at positions 2 and 4 (a tool answered at 3), row 1 at 1 and 2: positions 1, 2, 4 are predicted.
    rows = [
        row([11, 12, 13, 14, 15], [0, 0, 1, 0, 1], [-1.0, -2.0], advantage=0.5),
        row([21, 22, 23], [0, 1, 1], [-3.0, -4.0], advantage=-0.5),
    ]
    microbatch = make_microbatch(rows, (0, 1))
    assert microbatch.input_ids_BT.tolist() == [[11, 12, 13, 14, 15], [21, 22, 23, 0, 0]]
    assert microbatch.attention_mask_BT.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert microbatch.kept_positions_K.tolist() == [0, 1, 3]
    assert microbatch.targets_BK.tolist() == [[12, 13, 15], [22, 23, 0]]
    assert microbatch.mask_BK.tolist() == [[False, True, True], [True, True, False]]
    assert microbatch.generator_logprobs_BK.tolist() == [[0.0, -1.0, -2.0], [-3.0, -4.0, 0.0]]
    assert microbatch.advantages_B.tolist() == [0.5, -0.5]


@pytest.mark.parametrize(
    ("token_ids", "loss_mask", "generator_logprobs"),
    [
        ([1, 2, 3], [0, 1], [-1.0]),  # mask too short
        ([1, 2, 3], [0, 1, 1], [-1.0]),  # a logprob is missing
        ([1, 2, 3], [0, 0, 0], []),  # nothing to learn from
        ([1, 2, 3], [1, 1, 1], [-1.0, -1.0, -1.0]),  # nothing predicts the first token
    ],
)
def test_a_row_that_contradicts_itself_is_refused(
    token_ids: list[int], loss_mask: list[int], generator_logprobs: list[float]
) -> None:
    with pytest.raises(ValueError, match=r"sampled|mask entries"):
        row(token_ids, loss_mask, generator_logprobs)
