import pytest

from services.trainer.telemetry.recent_rate import WINDOW_S, RecentRate

pytestmark = pytest.mark.unit


def test_bursts_are_evened_out() -> None:
    rate = RecentRate()
    rates = [rate.add(1000 * (step % 2), elapsed_s=0.5) for step in range(200)]
    assert rates[0] == 0.0
    assert all(900 <= found <= 1100 for found in rates[40:])


def test_what_came_longer_ago_than_the_window_is_forgotten() -> None:
    rate = RecentRate()
    rate.add(5000, elapsed_s=1.0)
    assert rate.add(0, elapsed_s=WINDOW_S - 1.0) == pytest.approx(500.0)
    assert rate.add(0, elapsed_s=1.0) == 0.0


def test_a_step_longer_than_the_window_counts_alone() -> None:
    rate = RecentRate()
    rate.add(100, elapsed_s=1.0)
    assert rate.add(6000, elapsed_s=2 * WINDOW_S) == pytest.approx(300.0)
