"""Which calls form a round, and which texts a pass."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rewarder.reward_models.batching import PASSES_A_ROUND, next_round, passes

pytestmark = pytest.mark.unit


def test_a_pass_is_filled_with_texts_of_like_length_up_to_the_limit_with_padding() -> None:
    assert passes([2, 10, 9, 2], max_batch_tokens=20) == [[1, 2], [0, 3]]
    assert passes([2, 10, 9, 2], max_batch_tokens=40) == [[1, 2, 0, 3]]
    assert passes([100, 1], max_batch_tokens=20) == [[0], [1]], "a text longer than a pass gets its own pass"
    assert passes([], max_batch_tokens=20) == []


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 500))
def test_every_text_is_in_one_pass_and_no_pass_of_several_is_over_the_limit(lengths: list[int], limit: int) -> None:
    found = passes(lengths, max_batch_tokens=limit)
    assert sorted(index for chosen in found for index in chosen) == list(range(len(lengths)))
    for chosen in found:
        longest = max(lengths[index] for index in chosen)
        assert len(chosen) == 1 or longest * len(chosen) <= limit


def test_lanes_take_turns_and_a_round_is_bounded() -> None:
    lanes = {"busy": deque([1, 2, 3]), "quiet": deque([4])}
    num_tokens = {1: 100, 2: 100, 3: 100, 4: 100}
    assert PASSES_A_ROUND == 4
    assert next_round(lanes, num_tokens, max_batch_tokens=75) == [1, 4, 2]
    assert lanes == {"busy": deque([3])}
    assert next_round(lanes, num_tokens, max_batch_tokens=75) == [3]
    assert next_round(lanes, num_tokens, max_batch_tokens=75) == []


def test_a_call_that_is_larger_than_a_round_has_one_to_itself() -> None:
    lanes = {"a": deque([1, 2]), "b": deque([3])}
    num_tokens = {1: 10, 2: 10, 3: 1000}
    assert next_round(lanes, num_tokens, max_batch_tokens=20) == [1]
    assert next_round(lanes, num_tokens, max_batch_tokens=20) == [3]
    assert next_round(lanes, num_tokens, max_batch_tokens=20) == [2]
