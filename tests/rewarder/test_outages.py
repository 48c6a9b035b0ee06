"""The log lines when a reward function starts to fail and when it works again."""

import pytest

from services.rewarder.outages import Outages

pytestmark = pytest.mark.unit


class Told:
    """Outages with a fake clock, and their log lines. A call takes a second."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        self._caplog = caplog
        self._now_s = 0.0
        self._outages = Outages(clock=lambda: self._now_s)

    def after(self, calls: str) -> list[str]:
        """Return the log lines of these calls: x failed, o worked."""
        self._caplog.clear()
        for call in calls:
            self._now_s += 1.0
            if call == "x":
                self._outages.failed("mine.judge", "timeout: took longer than 30 s")
            else:
                self._outages.worked("mine.judge")
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    return Told(caplog)


BEGINS = "reward mine.judge failed 5 times in a row: timeout: took longer than 30 s"


def test_every_outage_is_logged_when_it_begins_and_ends_and_failures_in_between_are_not(told: Told) -> None:
    for _ in range(2):
        assert told.after("oxxxx") == []
        assert told.after("x") == [BEGINS]
        assert told.after("xxxxx") == []
        assert told.after("oooo") == []
        assert told.after("o") == ["reward mine.judge works again: 10 calls failed in 14 s"]


def test_a_function_that_fails_now_and_then_has_no_outage(told: Told) -> None:
    assert told.after("xxxxo" * 20) == []


def test_an_outage_in_which_a_call_works_now_and_then_is_one(told: Told) -> None:
    assert told.after("xxxxx") == [BEGINS]
    assert told.after("oooox" * 20) == []
    assert told.after("ooooo") == ["reward mine.judge works again: 25 calls failed in 109 s"]
