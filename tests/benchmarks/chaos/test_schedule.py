"""The order in which faults strike."""

import itertools

import pytest

from benchmarks.chaos import schedule
from benchmarks.chaos.schedule import CELLS, Fault, Strike

pytestmark = pytest.mark.unit


def first(number: int, seed: int) -> list[Strike]:
    return list(itertools.islice(schedule.schedule(seed), number))


def test_a_seed_is_all_that_the_order_depends_on() -> None:
    assert first(200, 7) == first(200, 7)
    assert first(200, 7) != first(200, 8)


def test_every_victim_suffers_every_fault_before_any_has_a_second_turn() -> None:
    struck: list[tuple[str, str]] = []
    for strike in schedule.schedule(3):
        cells = dict.fromkeys((fault.victim, fault.kind) for fault in strike.faults)  # a fault may strike twice in one
        struck += cells
        if len(struck) >= len(CELLS):
            break
    assert sorted(struck[: len(CELLS)]) == sorted(CELLS)


def test_every_process_is_killed_asked_to_end_and_stopped() -> None:
    expected = {
        "launcher", "trainer API", "rank", "generator", "engine worker",
        "rewarder", "fork server", "reward worker", "sessions", "tool worker", "Redis",
    }  # fmt: skip
    for kind in ("kill -9", "SIGTERM", "SIGSTOP"):
        assert {victim for victim, other in CELLS if other == kind} == expected


def test_some_faults_strike_in_pairs_and_some_outlast_a_lease() -> None:
    strikes = first(400, 0)
    sizes = {len(strike.faults) for strike in strikes}
    assert sizes == {1, 2}
    stops = [fault.held_s for strike in strikes for fault in strike.faults if fault.kind == schedule.STOP]
    assert min(stops) < 1
    assert max(stops) > 15
    assert all(fault.held_s == 0 for strike in strikes for fault in strike.faults if fault.kind == schedule.KILL)


def test_a_pair_is_of_two_faults_or_of_one_that_strikes_again() -> None:
    pairs = [strike.faults for strike in first(400, 0) if len(strike.faults) == 2]
    cells = [[(fault.victim, fault.kind) for fault in pair] for pair in pairs]
    again = [pair for pair in cells if pair[0] == pair[1]]
    assert 0 < len(again) < len(cells) / 2


def test_with_one_kind_of_fault_it_may_strike_again() -> None:
    cells = [(schedule.RANK, schedule.KILL)]
    strikes = list(itertools.islice(schedule.schedule(1, cells), 50))
    assert {str(fault) for strike in strikes for fault in strike.faults} == {"kill -9 of rank"}
    assert {len(strike.faults) for strike in strikes} == {1, 2}


def test_a_fault_says_what_it_does() -> None:
    assert str(Fault(schedule.REDIS, schedule.STOP, 2.25, 0)) == "SIGSTOP of Redis for 2.2 s"
    assert str(Fault(schedule.EVERYTHING, schedule.POWER_CUT, 0.0, 0)) == "power cut"
