"""How the rows of a step are divided among training ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.policy.rank_plan import RankPlan, Slot, plan_passes

pytestmark = pytest.mark.unit

rows_strategy = st.lists(st.tuples(st.integers(1, 120), st.booleans()), max_size=40)


def split(
    rows: list[tuple[int, bool]], *, num_ranks: int, max_tokens: int = 100, max_rows: int | None = None
) -> tuple[RankPlan, ...]:
    lengths, needs_backward = [length for length, _ in rows], [needs for _, needs in rows]
    return plan_passes(lengths, needs_backward, num_ranks=num_ranks, max_tokens=max_tokens, max_rows=max_rows)


def test_four_rows_on_two_ranks_are_split_so_that_both_have_as_much_to_do() -> None:
    # 9 + 4 and 7 + 6: always giving the longest row to the emptiest bin leads to exactly this.
    first, second = split([(9, True), (7, True), (6, True), (4, True)], num_ranks=2)
    assert (first, second) == ((Slot((1, 2), True),), (Slot((0, 3), True),))


def test_a_rank_without_rows_takes_part_with_an_empty_pass() -> None:
    assert split([(5, True)], num_ranks=3) == ((Slot((0,), True),), (Slot((), True),), (Slot((), True),))


def test_rows_that_teach_nothing_come_last_in_passes_of_their_own() -> None:
    plan = split([(5, False), (6, True)], num_ranks=2)
    assert plan == ((Slot((1,), True), Slot((), False)), (Slot((), True), Slot((0,), False)))


def test_without_rows_there_are_no_passes() -> None:
    assert split([], num_ranks=2) == ((), ())


def test_a_row_longer_than_the_budget_gets_its_own_pass() -> None:
    (plan,) = split([(10, True), (300, True), (10, True)], num_ranks=1)
    assert sorted(slot.row_indices for slot in plan) == [(0, 2), (1,)]


def test_one_row_a_pass_where_rows_are_not_packed() -> None:
    first, second = split([(3, True)] * 5, num_ranks=2, max_rows=1)
    assert [len(slot.row_indices) for slot in first + second] == [1, 1, 1, 1, 1, 0]


@given(rows=rows_strategy, num_ranks=st.integers(1, 5), max_rows=st.none() | st.integers(1, 4))
def test_every_row_is_in_exactly_one_pass(rows: list[tuple[int, bool]], num_ranks: int, max_rows: int | None) -> None:
    plan = split(rows, num_ranks=num_ranks, max_rows=max_rows)
    placed = [(index, slot.needs_backward) for passes in plan for slot in passes for index in slot.row_indices]
    assert sorted(placed) == [(index, needs) for index, (_, needs) in enumerate(rows)]


@given(rows=rows_strategy, num_ranks=st.integers(1, 5), max_rows=st.none() | st.integers(1, 4))
def test_all_ranks_make_the_same_passes_and_none_is_too_full(
    rows: list[tuple[int, bool]], num_ranks: int, max_rows: int | None
) -> None:
    plan = split(rows, num_ranks=num_ranks, max_rows=max_rows)
    assert len(plan) == num_ranks
    assert len({tuple(slot.needs_backward for slot in passes) for passes in plan}) == 1
    for passes in plan:
        for slot in passes:
            assert len(slot.row_indices) == 1 or sum(rows[index][0] for index in slot.row_indices) <= 100
            assert max_rows is None or len(slot.row_indices) <= max_rows
    for together in zip(*plan, strict=True):
        assert any(slot.row_indices for slot in together), "a pass in which no rank has a row"


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), num_ranks=st.integers(1, 5))
def test_within_a_pass_and_over_all_of_them_ranks_differ_by_at_most_a_few_rows(
    lengths: list[int], num_ranks: int
) -> None:
    """If the longest row always goes to the emptiest bin, bins differ by one row at most. Dealing passes keeps that."""
    plan = split([(length, True) for length in lengths], num_ranks=num_ranks)
    tokens = [[sum(lengths[index] for index in slot.row_indices) for slot in passes] for passes in plan]
    for together in zip(*tokens, strict=True):
        assert max(together) - min(together) <= max(lengths)
    totals = [sum(passes) for passes in tokens]
    assert max(totals) - min(totals) <= max(lengths)
