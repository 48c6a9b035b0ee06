"""Continuous batching as arithmetic, with numbers computed by hand."""

import pytest

from services.generator.simulated.decode_clock import DecodeClock, DecodedSequence
from shared.lineage import LineageVersion

pytestmark = pytest.mark.unit


def v(policy_version: int) -> LineageVersion:
    return LineageVersion(2, policy_version)


def a_clock(*, max_num_seqs: int = 8) -> DecodeClock:
    """Return a clock whose step takes 1 s for one sequence, and half a second more for each further sequence."""
    clock = DecodeClock(step_s=lambda count: 1.0 + 0.5 * (count - 1), max_num_seqs=max_num_seqs)
    clock.set_version(v(0))
    return clock


def a_sequence(num_tokens: int, *, first_token_s: float = 2.0) -> DecodedSequence:
    return DecodedSequence(num_tokens, first_token_s)


def test_a_single_sequence_takes_its_first_token_and_a_step_for_each_other_token() -> None:
    clock, one = a_clock(), a_sequence(4)
    clock.submit(one)
    assert clock.next_event_s() == 2.0
    assert clock.advance(4.9) == []
    assert clock.num_tokens(one) == 3
    assert clock.next_event_s() == pytest.approx(5.0)
    assert clock.advance(5.0) == [one]
    assert one.spans == [(v(0), 0, 4)]
    assert clock.next_event_s() is None


def test_two_sequences_slow_each_other_down_while_both_decode() -> None:
    clock, short, long = a_clock(), a_sequence(3), a_sequence(5)
    clock.submit(short)
    clock.submit(long)
    # Both have their first token at 2. Two steps of 1.5 s finish the short one at 5; two of 1 s the long one at 7.
    assert clock.advance(5.0) == [short]
    assert clock.next_event_s() == pytest.approx(7.0)
    assert clock.advance(100.0) == [long]


def test_a_later_sequence_changes_the_pace_from_then_on() -> None:
    clock, first, second = a_clock(), a_sequence(5), a_sequence(1, first_token_s=0.0)
    clock.submit(first)
    assert clock.advance(4.0) == []  # 3 of 5 tokens
    clock.submit(second)
    # A sequence of one token ends with its first token, so it shares no step.
    assert clock.advance(6.0) == [second, first]


def test_one_that_finds_no_place_waits_for_it() -> None:
    clock, first, second = a_clock(max_num_seqs=1), a_sequence(2), a_sequence(1)
    clock.submit(first)
    clock.submit(second)
    assert clock.advance(3.0) == [first]
    assert clock.next_event_s() == pytest.approx(5.0)
    assert clock.advance(5.0) == [second]


def test_a_hold_adds_exactly_its_own_time() -> None:
    clock, one = a_clock(), a_sequence(4)
    clock.submit(one)
    clock.advance(3.5)
    clock.pause()
    assert clock.next_event_s() is None
    assert clock.advance(50.0) == []
    assert clock.num_tokens(one) == 2
    clock.resume()
    assert clock.advance(51.4) == []
    assert clock.advance(51.5) == [one]


def test_a_version_taken_on_in_flight_is_that_of_the_tokens_after_it() -> None:
    clock, one, late = a_clock(), a_sequence(6, first_token_s=0.0), a_sequence(2, first_token_s=0.0)
    clock.submit(one)
    clock.advance(2.5)  # tokens 0, 1 and 2
    clock.set_version(v(1))
    clock.set_version(v(2))
    clock.advance(3.5)  # token 3
    clock.set_version(v(3))
    clock.submit(late)
    clock.advance(100.0)
    assert one.spans == [(v(0), 0, 3), (v(2), 3, 4), (v(3), 4, 6)]
    assert late.spans == [(v(3), 0, 2)]


def test_an_aborted_sequence_gives_its_place_back_and_never_finishes() -> None:
    clock = a_clock(max_num_seqs=2)
    decoding, prefilling, waiting, last = (
        a_sequence(9, first_token_s=0.0),
        a_sequence(9),
        a_sequence(9),
        a_sequence(1),
    )
    for sequence in (decoding, prefilling, waiting, last):
        clock.submit(sequence)
    clock.advance(1.0)
    for sequence in (decoding, waiting, prefilling):
        clock.abort(sequence)
        clock.abort(sequence)
    assert clock.advance(3.0) == [last]
    assert clock.advance(1000.0) == []
    assert clock.next_event_s() is None


def test_many_sequences_all_finish_each_with_all_its_tokens() -> None:
    clock = DecodeClock(step_s=lambda count: 0.01 + 0.0001 * count, max_num_seqs=16)
    clock.set_version(v(7))
    sequences = [a_sequence(1 + 7 * number % 50, first_token_s=0.013 * number % 1) for number in range(200)]
    for sequence in sequences:
        clock.submit(sequence)
    finished: list[DecodedSequence] = []
    now_s = 0.0
    while (due_s := clock.next_event_s()) is not None:
        assert due_s >= now_s
        now_s = due_s
        finished += clock.advance(now_s)
    assert len(finished) == 200
    assert all(sequence.spans == [(v(7), 0, sequence.num_tokens)] for sequence in sequences)
