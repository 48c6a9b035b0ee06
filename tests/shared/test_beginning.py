"""Which rows are left to a run that takes over the data of another."""

import pytest

from shared.beginning import Beginning, RowCursor

pytestmark = pytest.mark.unit


def rows(cursor: RowCursor, count: int) -> list[int]:
    return [cursor.row(number) for number in range(count)]


def test_a_run_that_begins_anew_takes_the_rows_in_order() -> None:
    assert rows(RowCursor(), 4) == [0, 1, 2, 3]


def test_rows_of_groups_that_were_in_flight_come_first_and_no_row_is_skipped() -> None:
    """The source admitted rows 0 to 9, and trained or dropped all but 4, 7 and 8."""
    assert rows(RowCursor().after(admitted=10, in_flight=[4, 7, 8]), 6) == [4, 7, 8, 10, 11, 12]


def test_a_run_that_continues_a_continued_run_goes_on_where_that_one_was() -> None:
    """Groups 0 to 4 of the source were rows 4, 7, 8, 10 and 11. It did not settle its groups 1 and 4."""
    source = RowCursor(left=(4, 7, 8), next=10)
    assert rows(source.after(admitted=5, in_flight=[1, 4]), 4) == [7, 11, 12, 13]


def test_a_run_that_had_not_used_up_what_was_left_to_it_hands_the_rest_on() -> None:
    source = RowCursor(left=(4, 7, 8), next=10)
    assert rows(source.after(admitted=1, in_flight=[]), 4) == [7, 8, 10, 11]


@pytest.mark.parametrize(
    ("beginning", "words"),
    [
        (Beginning("model", "/m", "/m", weights_only=True), "/m, weights only"),
        (Beginning("checkpoint", "/c", "run-a:4", run_id="run-a", step=4), "step 4 of run-a"),
        (Beginning("checkpoint", "/c", "one", run_id="run-a", run_name="one", step=4), "step 4 of run-a (one)"),
    ],
)
def test_a_beginning_is_told_in_words(beginning: Beginning, words: str) -> None:
    assert beginning.in_words() == words
