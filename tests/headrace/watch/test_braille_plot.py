"""Curves of dots, checked dot by dot."""

import pytest

from headrace.watch.braille_plot import braille_curve, nice_bounds, sparkline

pytestmark = pytest.mark.unit


def test_a_rising_line_goes_from_the_lower_left_dot_to_the_upper_right_one() -> None:
    # 2 columns of 4 dots: values 0 and 1 are the dots 0x40 (left, lowest) and 0x08 (right, highest);
    # the rise in between is drawn in the right column: 0x10 and 0x20.
    assert braille_curve([0.0, 1.0], width=1, height=1, low=0.0, high=1.0) == [chr(0x2800 + 0x40 + 0x08 + 0x10 + 0x20)]


def test_a_constant_is_a_level_line() -> None:
    # 0.0 over two characters: the lowest dots of all four columns.
    assert braille_curve([0.0], width=2, height=1, low=0.0, high=1.0) == [chr(0x2800 + 0x40 + 0x80) * 2]


def test_half_a_run_fills_half_the_width() -> None:
    (line,) = braille_curve([0.0, 0.0], width=4, height=1, low=0.0, high=1.0, share=0.5)
    assert line == chr(0x2800 + 0x40 + 0x80) * 2 + chr(0x2800) * 2


def test_nothing_yet_is_an_empty_picture() -> None:
    assert braille_curve([], width=3, height=2, low=0.0, high=1.0) == [chr(0x2800) * 3] * 2


def test_values_outside_the_bounds_stay_in_the_picture() -> None:
    # Both columns lie on the upper edge (0x01 and 0x08).
    assert braille_curve([7.0, 9.0], width=1, height=1, low=0.0, high=1.0) == [chr(0x2800 + 0x01 + 0x08)]


def test_many_values_in_one_column_are_averaged() -> None:
    # 4 values on 2 columns: means 0 and 1.
    assert braille_curve([-1.0, 1.0, 1.0, 1.0], width=1, height=1, low=0.0, high=1.0) == braille_curve(
        [0.0, 1.0], width=1, height=1, low=0.0, high=1.0
    )


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
