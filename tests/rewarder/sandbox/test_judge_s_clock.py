"""Whether code that ran out of time was slow or was kept from running."""

import pytest

from services.rewarder.sandbox.inside.judge import was_too_busy

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("used_s", "waited_s", "is_too_busy"),
    [
        (2.9, 7.0, True),  # it computed or waited for a processor all the time
        (0.1, 6.0, True),
        (0.1, 0.2, False),  # it slept
        (0.1, 4.0, False),
        (3.0, 7.0, False),  # it had all the processor time that it may have
        (20.0, 60.0, False),  # it uses all processors itself
    ],
)
def test_code_is_not_failed_for_time_in_which_it_waited_for_a_processor(
    used_s: float, waited_s: float, *, is_too_busy: bool
) -> None:
    assert was_too_busy(used_s=used_s, allowed_s=3.0, waited_s=waited_s, timeout_s=10.0, num_made=15) == is_too_busy
    assert not was_too_busy(used_s=used_s, allowed_s=3.0, waited_s=waited_s, timeout_s=10.0, num_made=16)
