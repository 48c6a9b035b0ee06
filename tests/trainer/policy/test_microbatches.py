from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from services.trainer.policy.microbatches import TrainRow, needs_backward, pack_rows
from shared.run_options.run_config import RunConfig

pytestmark = pytest.mark.unit


def row(
    token_ids: list[int],
    loss_mask: list[int],
    generator_logprobs: list[float],
    advantage: float | npt.NDArray[np.float32] = 1.0,
) -> TrainRow:
    return TrainRow(
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=np.array(loss_mask, dtype=np.uint8),
        generator_logprobs=np.array(generator_logprobs, dtype=np.float32),
        advantage=advantage,
    )


def test_rows_stand_end_to_end_and_the_logits_before_sampled_tokens_are_asked_for() -> None:
    # Row 0 has samples at 2 and 4 (a tool's answer is at 3); row 1 at its positions 1 and 2, the pass's 6 and 7.
    rows = [
        row([11, 12, 13, 14, 15], [0, 0, 1, 0, 1], [-1.0, -2.0]),
        row([21, 22, 23], [0, 1, 1], [-3.0, -4.0]),
        row([31, 32], [0, 1], [-5.0]),
    ]
    microbatch = pack_rows(rows, (0, 1))
    assert microbatch.input_ids_N.tolist() == [11, 12, 13, 14, 15, 21, 22, 23]
    assert microbatch.position_ids_N.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert microbatch.cu_seqlens == (0, 5, 8)
    assert microbatch.sampled_positions_M.tolist() == [1, 3, 5, 6]
    assert microbatch.targets_M.tolist() == [13, 15, 22, 23]
    assert microbatch.mask_BT.tolist() == [[True, True], [True, True]]
    assert pack_rows(rows, (2, 0)).mask_BT.tolist() == [[True, False], [True, True]]
    assert microbatch.num_tokens == 8


def test_a_row_has_one_advantage_or_one_for_each_sampled_token() -> None:
    assert row([1, 2, 3], [0, 1, 1], [-1.0, -1.0], 0.5).advantages.tolist() == [0.5]
    each = np.array([0.5, -0.25], dtype=np.float32)
    assert row([1, 2, 3], [0, 1, 1], [-1.0, -1.0], each).advantages.tolist() == [0.5, -0.25]
    with pytest.raises(ValueError, match="2 sampled tokens and 3 advantages"):
        row([1, 2, 3], [0, 1, 1], [-1.0, -1.0], np.zeros(3, dtype=np.float32))


def test_a_row_learns_if_any_of_its_tokens_has_an_advantage() -> None:
    config = RunConfig.model_validate({"model": "m", "dataset_name": "d", "reward_funcs": ["accuracy_reward"]})
    idle, learning = np.zeros(2, dtype=np.float32), np.array([0.0, -1.0], dtype=np.float32)
    for advantage, expected in ((idle, False), (learning, True)):
        one = row([1, 2, 3], [0, 1, 1], [-1.0, -1.0], advantage)
        assert needs_backward(one, config, has_router_loss=False) == expected


def test_a_pass_without_rows_is_a_dummy_of_two_tokens() -> None:
    microbatch = pack_rows([], ())
    assert microbatch.row_indices == ()
    assert (microbatch.num_tokens, microbatch.cu_seqlens) == (2, (0, 2))
    assert microbatch.sampled_positions_M.tolist() == [0]


@pytest.mark.parametrize(
    ("advantage", "settings", "expected"),
    [
        (0.5, {}, True),
        (0.0, {}, False),
        (0.0, {"beta": 0.1}, True),
        (0.0, {"entropy_coef": 0.1}, True),
        (0.0, {"use_adaptive_entropy": True}, True),
    ],
)
def test_a_row_of_advantage_zero_learns_only_from_other_terms_of_the_loss(
    advantage: float, settings: dict[str, Any], expected: bool
) -> None:
    config = RunConfig.model_validate(
        {"model": "m", "dataset_name": "d", "reward_funcs": ["accuracy_reward"], **settings}
    )
    given = row([1, 2], [0, 1], [-1.0], advantage)
    assert needs_backward(given, config, has_router_loss=False) is expected
    assert needs_backward(given, config, has_router_loss=True)


@pytest.mark.parametrize("name", ["old_logprobs", "reference_logprobs"])
def test_logprobs_of_other_policies_are_one_a_sampled_token(name: str) -> None:
    good = row([1, 2, 3], [0, 1, 1], [-1.0, -1.0])
    with pytest.raises(ValueError, match=f"2 sampled tokens and 3 {name}"):
        cast(Any, replace)(good, **{name: np.zeros(3, dtype=np.float32)})


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
