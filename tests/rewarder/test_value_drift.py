"""Mean and spread of a function's recent values."""

import pytest

from services.rewarder.rewarder_metrics import ValueDrift

pytestmark = pytest.mark.unit


def test_the_first_values_have_their_mean_and_their_standard_deviation() -> None:
    drift = ValueDrift()
    for value in (2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0):
        drift.add(value)
    assert drift.mean == pytest.approx(5.0)
    assert drift.std == pytest.approx(2.0)


def test_nothing_scored_yet_is_zero() -> None:
    assert (ValueDrift().mean, ValueDrift().std) == (0.0, 0.0)


def test_a_judge_that_begins_to_say_the_same_to_everybody_can_be_seen() -> None:
    drift = ValueDrift()
    for _ in range(2000):
        drift.add(0.0)
        drift.add(1.0)
    assert drift.mean == pytest.approx(0.5, abs=0.01)
    assert drift.std == pytest.approx(0.5, abs=0.01)
    for _ in range(5000):
        drift.add(1.0)
    assert drift.mean > 0.99
    assert drift.std < 0.06


def test_values_too_large_to_square_are_forgotten() -> None:
    drift = ValueDrift()
    for value in (1e308, -1e308, 3.0, 5.0):
        drift.add(value)
    assert (drift.mean, drift.std) == (4.0, 1.0)
