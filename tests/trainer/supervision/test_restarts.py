"""How often a crashed rank is restarted, and after which pause."""

import pytest

from services.trainer.supervision.restarts import Restarts

pytestmark = pytest.mark.unit


def make(max_without_progress: int = 3, *, best_step: int = 0) -> Restarts:
    return Restarts(
        max_without_progress=max_without_progress, first_backoff_s=0.5, last_backoff_s=3.0, best_step=best_step
    )


def test_pauses_double_up_to_the_longest_and_then_it_is_enough() -> None:
    restarts = make(4)
    assert [restarts.next_backoff_s(0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, None]
    assert restarts.total == 4


def test_a_new_step_starts_the_count_again() -> None:
    restarts = make(1)
    assert restarts.next_backoff_s(1) == 0.5
    assert restarts.next_backoff_s(2) == 0.5
    assert restarts.next_backoff_s(2) is None


def test_repeating_steps_after_a_checkpoint_does_not_count_as_progress() -> None:
    restarts = make(2, best_step=20)
    assert restarts.next_backoff_s(15) == 0.5
    assert restarts.next_backoff_s(20) == 1.0
    assert restarts.next_backoff_s(20) is None


def test_no_restarts_can_be_asked_for() -> None:
    assert make(0).next_backoff_s(0) is None


def test_crashes_of_a_paused_run_are_not_counted() -> None:
    restarts = make(1)
    assert [restarts.next_backoff_s(0, is_paused=True) for _ in range(5)] == [3.0] * 5
    assert restarts.next_backoff_s(0) == 0.5
    assert restarts.next_backoff_s(0, is_paused=True) == 3.0
    assert restarts.next_backoff_s(0) is None
    assert restarts.total == 7
