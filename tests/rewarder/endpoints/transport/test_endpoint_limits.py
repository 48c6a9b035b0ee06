"""Circuit breakers and retries of an endpoint, with a fake clock."""

import random

import pytest

from services.rewarder.endpoints.transport.breaker import Breaker
from services.rewarder.endpoints.transport.retries import backoff_s, outcome_of_status

pytestmark = pytest.mark.unit


def test_a_breaker_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(max_failures=2, pause_s=10)
    for now in (0.0, 1.0, 2.0):
        breaker.failed("it answered 500", now, is_probe=breaker.starts())
        breaker.answered()
    assert breaker.why_not(2.0) is None
    for now in (3.0, 4.0):
        assert breaker.why_not(now) is None
        breaker.failed("it answered 500", now, is_probe=breaker.starts())
    assert breaker.state(5.0) == "open"
    assert breaker.why_not(5.0) == (
        "it failed 2 times in a row (it answered 500) and is not called now; it is tried again in 9 s"
    )


def test_a_single_probe_is_sent_and_decides() -> None:
    breaker = Breaker(max_failures=1, pause_s=10)
    breaker.failed("down", 0.0, is_probe=breaker.starts())
    assert breaker.why_not(9.9) is not None
    assert breaker.why_not(10.0) is None
    assert breaker.state(10.0) == "open", "it is until an answer comes"
    assert breaker.state(10.0 + 3600) == "closed", "nothing may ever be sent again, and an alert would last for ever"
    is_probe = breaker.starts()
    assert (is_probe, breaker.state(10.0)) == (True, "half-open")
    assert str(breaker.why_not(10.0)).endswith("it is being tried again now")
    breaker.failed("down", 11.0, is_probe=is_probe)
    assert breaker.state(20.9) == "open"
    assert breaker.why_not(20.9) is not None
    is_probe = breaker.starts()
    breaker.gave_up(is_probe=is_probe)
    assert breaker.why_not(21.0) is None, "a probe that was cancelled is made again"
    breaker.starts()
    breaker.answered()
    assert (breaker.state(21.0), breaker.why_not(21.0)) == ("closed", None)


def test_late_failures_do_not_make_the_pause_longer() -> None:
    breaker = Breaker(max_failures=1, pause_s=10)
    first, second = breaker.starts(), breaker.starts()
    breaker.failed("down", 0.0, is_probe=first)
    breaker.failed("down", 9.0, is_probe=second)
    assert breaker.why_not(10.0) is None
    probe = breaker.starts()
    breaker.failed("down", 10.0, is_probe=False)
    assert breaker.state(10.0) == "half-open", "the probe is still running"
    assert probe


def test_backoff_is_full_jitter_under_a_bound_that_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        bounds.append((low, high))
        return high

    monkeypatch.setattr(random, "uniform", uniform)
    waits = [backoff_s(num_tries, {}, now_s=0.0) for num_tries in (1, 2, 3, 6, 7, 50)]
    assert waits == [0.25, 0.5, 1.0, 8.0, 10.0, 10.0]
    assert {low for low, _ in bounds} == {0.0}


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        ("3", 3.0), (" 3 ", 3.0), ("0", 0.0), ("Sun, 22 Nov 2026 09:00:10 GMT", 10.0), ("soon", 0.0), ("-1", 0.0),
        ("Sun, 22 Nov 2020 09:00:10 GMT", 0.0), ("9" * 400, 999_999_999.0), ("²", 0.0), ("", 0.0),
    ],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date(header: str, wait_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_jitter(low: float, high: float) -> float:
        return 0.0 * low * high

    monkeypatch.setattr(random, "uniform", no_jitter)
    nine_o_clock = 1795338000.0
    assert backoff_s(1, {"retry-after": header}, now_s=nine_o_clock) == wait_s


def test_statuses_mean_overload_or_error() -> None:
    assert {status: outcome_of_status(status) for status in (400, 404, 429, 500, 502, 503, 504)} == {
        400: "error", 404: "error", 429: "overload", 500: "error", 502: "error", 503: "overload", 504: "error",
    }  # fmt: skip
