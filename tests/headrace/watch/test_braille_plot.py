"""Curves of dots, checked dot by dot."""

import pytest

from headrace.watch.braille_plot import braille_curve, nice_bounds, sparkline

pytestmark = pytest.mark.unit


def drawn(points: list[tuple[int, float]], *, width: int, first: int = 1, last: int = 2) -> list[str]:
    return braille_curve(points, width=width, height=1, low=0.0, high=1.0, first=first, last=last)


def dot(row: int, column: int) -> int:
    return ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))[row][column % 2]


def test_a_rising_line_goes_from_the_lower_left_dot_to_the_upper_right_one() -> None:
    # 2 columns of 4 dots: values 0 and 1 are the dots 0x40 (left, lowest) and 0x08 (right, highest);
    # the rise in between is drawn in the right column: 0x10 and 0x20.
    assert drawn([(1, 0.0), (2, 1.0)], width=1) == [chr(0x2800 + 0x40 + 0x08 + 0x10 + 0x20)]


def test_a_constant_is_a_level_line() -> None:
    # 0.0 over two characters: the lowest dots of all four columns.
    assert drawn([(1, 0.0), (2, 0.0)], width=2) == [chr(0x2800 + 0x40 + 0x80) * 2]


def test_a_curve_begins_and_ends_at_its_steps() -> None:
    # 8 columns for the steps 0 to 7: the steps 2 to 5 are the third to the sixth.
    (line,) = drawn([(2, 0.0), (5, 0.0)], width=4, first=0, last=7)
    assert line == chr(0x2800) + chr(0x2800 + 0x40 + 0x80) * 2 + chr(0x2800)


def test_few_values_lie_at_their_steps_with_straight_lines_between_them() -> None:
    # 16 columns for the steps 0 to 60. The values rise by a third of the height each: rows 3, 2, 1, 0 of the dots at
    # the columns 0, 5, 10 and 15, and each line between two of them changes its row halfway.
    points = [(0, 0.0), (20, 1 / 3), (40, 2 / 3), (60, 1.0)]
    (line,) = drawn(points, width=8, first=0, last=60)
    rows = [row for column in range(16) for row in range(4) if ord(line[column // 2]) & dot(row, column)]
    assert rows == [3, 3, 3, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0]


def test_one_value_is_a_dot() -> None:
    assert drawn([(1, 0.0)], width=2, first=1, last=1) == [chr(0x2800 + 0x40) + chr(0x2800)]


def test_nothing_yet_is_an_empty_picture() -> None:
    assert braille_curve([], width=3, height=2, low=0.0, high=1.0, first=1, last=1) == [chr(0x2800) * 3] * 2


def test_values_outside_the_bounds_stay_in_the_picture() -> None:
    # Both columns lie on the upper edge (0x01 and 0x08).
    assert drawn([(1, 7.0), (3, 9.0)], width=1) == [chr(0x2800 + 0x01 + 0x08)]


def test_many_values_in_one_column_are_averaged() -> None:
    # 4 values on 2 columns: means 0 and 1.
    values = [(1, -1.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert drawn(values, width=1, last=4) == drawn([(1, 0.0), (2, 1.0)], width=1)


def test_a_sparkline_shows_the_newest_values_against_the_largest_of_them() -> None:
    assert sparkline([100.0, 0.0, 4.0, 8.0], width=3) == "▁▅█"
    assert sparkline([], width=3) == ""
    assert sparkline([1.0, 2.0], width=0) == ""
    assert sparkline([0.0, 0.0], width=3) == "▁▁"


def test_rewards_between_0_and_1_have_the_axis_0_to_1() -> None:
    assert nice_bounds([]) == (0.0, 1.0)
    assert nice_bounds([0.2, 0.4]) == (0.0, 1.0)
    assert nice_bounds([0.0, 3.0]) == (0.0, 3.0)
    assert nice_bounds([-2.0, -2.0]) == (-2.0, -1.0)
