"""How long a fault kept a run from training."""

import pytest

from benchmarks.chaos.trial import recovery_s

pytestmark = pytest.mark.unit


def test_recovery_ends_with_the_next_step() -> None:
    assert recovery_s(10.0, [9.0, 9.5, 16.0, 16.5, 17.0]) == 6.0


def test_steps_that_had_begun_before_the_fault_do_not_count_as_recovery() -> None:
    assert recovery_s(10.0, [9.5, 10.1, 10.4, 18.0, 18.3]) == 8.0


def test_a_run_that_makes_no_further_step_has_not_recovered() -> None:
    assert recovery_s(10.0, [9.0, 9.5]) is None
