"""Turns and per-minute limits, with a fake clock."""

import asyncio
import time
from collections import deque

import pytest

from services.rewarder.turnstile import TurnedAwayError, Turnstile, WaitedTooLongError

pytestmark = pytest.mark.unit


def turnstile(
    *, now: float = 0.0, max_concurrency: int = 2, max_queued: int = 10, rpm: int | None = None, tpm: int | None = None
) -> tuple[Turnstile, list[float]]:
    clock = [now]
    return (
        Turnstile(
            max_concurrency=max_concurrency,
            max_queued=max_queued,
            requests_per_minute=rpm,
            tokens_per_minute=tpm,
            queue_timeout_s=60.0,
            now=lambda: clock[0],
        ),
        clock,
    )


async def turn_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def entering(gate: Turnstile, lane: str, order: list[str], *, tokens: int = 0) -> "asyncio.Task[None]":
    async def enter() -> None:
        await gate.enter(lane=lane, tokens=tokens)
        order.append(lane)

    return asyncio.create_task(enter())


async def look_at(now: float, gate: Turnstile, clock: list[float]) -> None:
    """Set the gate's time to ``now``."""
    clock[0] = now
    gate.num_in_flight += 1
    gate.leave()
    await turn_loop()


async def test_lanes_take_turns() -> None:
    gate, _ = turnstile(max_concurrency=1)
    order: list[str] = []
    tasks = [entering(gate, lane, order) for lane in ("a", "a", "a", "b", "c")]
    for _ in tasks:
        await turn_loop()
        gate.leave()
    await asyncio.gather(*tasks)
    assert order == ["a", "a", "b", "c", "a"]
    assert (gate.num_in_flight, gate.num_queued) == (0, 0)


async def test_one_too_many_is_turned_away_at_once() -> None:
    gate, _ = turnstile(max_concurrency=1, max_queued=1)
    order: list[str] = []
    tasks = [entering(gate, "a", order) for _ in range(2)]
    await turn_loop()
    with pytest.raises(TurnedAwayError, match="1 requests wait already"):
        await gate.enter(lane="b", tokens=0)
    gate.leave()
    await asyncio.gather(*tasks)


async def test_a_cancelled_waiter_takes_no_turn() -> None:
    gate, _ = turnstile(max_concurrency=1)
    order: list[str] = []
    tasks = [entering(gate, lane, order) for lane in ("a", "b", "c")]
    await turn_loop()
    tasks[1].cancel()
    gate.leave()  # in the same moment
    await turn_loop()
    assert order == ["a", "c"]
    gate.leave()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (gate.num_in_flight, gate.num_queued) == (0, 0)


async def test_no_minute_has_more_requests_than_the_limit() -> None:
    gate, clock = turnstile(max_concurrency=100, rpm=2)
    order: list[str] = []
    tasks = [entering(gate, "a", order) for _ in range(5)]
    await turn_loop()
    assert len(order) == 2
    for now, num_out in ((59.9, 2), (60.0, 4), (119.0, 4), (120.0, 5)):
        await look_at(now, gate, clock)
        assert len(order) == num_out, now
    await asyncio.gather(*tasks)


async def test_tokens_count_too_and_a_giant_is_sent_when_nothing_else_was() -> None:
    gate, clock = turnstile(max_concurrency=100, tpm=100)
    order: list[str] = []
    tasks = [entering(gate, "a", order, tokens=tokens) for tokens in (60, 40, 1000, 1)]
    await turn_loop()
    assert len(order) == 2
    for now, num_out in ((60.0, 3), (119.0, 3), (120.0, 4)):
        await look_at(now, gate, clock)
        assert len(order) == num_out, now
    await asyncio.gather(*tasks)


async def test_a_full_queue_accepts_no_call_while_a_giant_is_first_in_it() -> None:
    gate, _ = turnstile(max_concurrency=100, max_queued=1, tpm=100)
    order: list[str] = []
    tasks = [entering(gate, "a", order, tokens=tokens) for tokens in (60, 1000)]
    await turn_loop()
    assert (order, gate.num_queued) == (["a"], 1)
    for _ in range(3):
        with pytest.raises(TurnedAwayError, match="1 requests wait already"):
            await gate.enter(lane="b", tokens=1)  # which fits into the limit of this minute
    assert gate.num_queued == 1
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await gate.enter(lane="b", tokens=1)


async def test_a_retry_takes_from_the_minute_as_well() -> None:
    gate, _ = turnstile(max_concurrency=100, rpm=2)
    await gate.enter(lane="a", tokens=0)
    await gate.retry(0, within_s=0.0)
    order: list[str] = []
    waiting = entering(gate, "a", order)
    await turn_loop()
    assert order == []
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_retry_that_the_minute_has_no_room_for_before_its_deadline_is_none() -> None:
    gate, clock = turnstile(max_concurrency=100, rpm=1)
    await gate.enter(lane="a", tokens=0)
    clock[0] = 10.0
    with pytest.raises(WaitedTooLongError, match="no room for one more within the deadline: 100 at a time, 1 a minute"):
        await gate.retry(0, within_s=49.9)
    clock[0] = 60.0
    await gate.retry(0, within_s=0.0)
    with pytest.raises(WaitedTooLongError):
        await gate.retry(0, within_s=59.9)


async def test_a_retry_waits_until_the_minute_has_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Turnstile(requests_per_minute=1, queue_timeout_s=60)
    last_sent_at = time.monotonic() - 59.5
    monkeypatch.setattr(gate, "_sent", deque([(last_sent_at, 0)]))
    await gate.retry(0, within_s=30.0)
    assert time.monotonic() - last_sent_at >= 60
    with pytest.raises(WaitedTooLongError):
        await gate.retry(0, within_s=1.0)


async def test_the_minute_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Turnstile(max_concurrency=9, max_queued=9, requests_per_minute=1, queue_timeout_s=60)
    last_sent_at = time.monotonic() - 59.5
    monkeypatch.setattr(gate, "_sent", deque([(last_sent_at, 0)]))
    async with asyncio.timeout(30):
        await gate.enter(lane="a", tokens=0)
    assert time.monotonic() - last_sent_at >= 60


async def test_a_call_that_waits_too_long_gets_the_limits_and_leaves_no_trace() -> None:
    gate = Turnstile(max_concurrency=1, tokens_per_minute=9, queue_timeout_s=0.01)
    await gate.enter(lane="a", tokens=1)
    with pytest.raises(TurnedAwayError, match=r"waited 0\.01 s for its turn: 1 at a time, 9 tokens a minute"):
        await gate.enter(lane="a", tokens=1)
    gate.leave()
    await gate.enter(lane="a", tokens=1)
    assert (gate.num_in_flight, gate.num_queued) == (1, 0)


async def test_without_limits_everybody_walks_through() -> None:
    gate = Turnstile(queue_timeout_s=60)
    for _ in range(1000):
        await gate.enter(lane="a", tokens=10**9)
    assert (gate.num_in_flight, gate.num_queued) == (1000, 0)
