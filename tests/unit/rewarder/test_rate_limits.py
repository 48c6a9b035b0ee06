"""Limits of a function: buckets by a clock of the test's, places by lanes."""

import asyncio

import pytest
from pydantic import ValidationError

from services.rewarder.rate_limits import CallLimits, Limiter, Places, TokenBucket, num_tokens
from services.rewarder.reward_call import RewardCall
from services.rewarder.worker_pool import RewardFailure


def test_a_bucket_of_600_a_minute_lets_60_through_at_once_and_then_ten_a_second() -> None:
    bucket = TokenBucket(600.0, now_s=100.0)
    for _ in range(60):
        assert bucket.wait_s(1.0, now_s=100.0) == 0.0
        bucket.take(1.0, now_s=100.0)
    assert bucket.wait_s(1.0, now_s=100.0) == pytest.approx(0.1)
    assert bucket.wait_s(1.0, now_s=100.05) == pytest.approx(0.05)
    assert bucket.wait_s(1.0, now_s=100.1) == pytest.approx(0.0, abs=1e-9)
    assert bucket.wait_s(5.0, now_s=100.1) == pytest.approx(0.4)


def test_in_no_minute_a_bucket_lets_more_than_a_tenth_above_its_rate_through() -> None:
    bucket = TokenBucket(600.0, now_s=0.0)
    taken_at_s: list[float] = []
    for millisecond in range(0, 180_000, 10):
        now_s = millisecond / 1000
        while bucket.wait_s(1.0, now_s=now_s) == 0.0:
            bucket.take(1.0, now_s=now_s)
            taken_at_s.append(now_s)
    most = max(sum(start <= at_s < start + 60 for at_s in taken_at_s) for start in range(120))
    assert 600 <= most <= 661
    assert 1850 <= len(taken_at_s) <= 1860, "60 at once and 600 in each of three minutes"


def test_what_is_larger_than_the_bucket_goes_through_a_full_one_and_leaves_a_debt() -> None:
    bucket = TokenBucket(600.0, now_s=0.0)  # holds 60, and 10 more come in a second
    assert bucket.wait_s(100.0, now_s=0.0) == 0.0
    bucket.take(100.0, now_s=0.0)
    assert bucket.wait_s(1.0, now_s=0.0) == pytest.approx(4.1), "40 of debt and 1"
    assert bucket.wait_s(100.0, now_s=0.0) == pytest.approx(10.0), "until it is full again"


def test_less_than_one_call_in_six_seconds_is_still_a_rate() -> None:
    bucket = TokenBucket(2.0, now_s=0.0)
    assert bucket.wait_s(1.0, now_s=0.0) == 0.0
    bucket.take(1.0, now_s=0.0)
    assert bucket.wait_s(1.0, now_s=0.0) == pytest.approx(30.0)


def test_a_bucket_that_stood_still_for_an_hour_holds_no_more_than_before() -> None:
    bucket = TokenBucket(60.0, now_s=0.0)
    bucket.take(6.0, now_s=0.0)
    assert bucket.wait_s(6.0, now_s=3600.0) == 0.0
    bucket.take(6.0, now_s=3600.0)
    assert bucket.wait_s(1.0, now_s=3600.0) == pytest.approx(1.0)


async def test_lanes_take_turns_at_a_place() -> None:
    places = Places(1)
    order: list[str] = []

    async def visit(lane: str, name: str) -> None:
        await places.take(lane)
        order.append(name)
        places.give()

    await places.take("A")
    visits = [asyncio.create_task(visit(name[0], name)) for name in ("A1", "A2", "A3", "B1", "C1", "B2")]
    await asyncio.sleep(0)
    places.give()
    await asyncio.gather(*visits)
    assert order == ["A1", "B1", "C1", "A2", "B2", "A3"]


async def test_a_place_that_was_given_to_somebody_who_left_goes_to_the_next() -> None:
    places = Places(1)
    await places.take("A")
    leaves = asyncio.create_task(places.take("A"))
    stays = asyncio.create_task(places.take("A"))
    await asyncio.sleep(0)
    places.give()  # to `leaves`, which is cancelled before it can take it
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    await stays


async def test_no_more_calls_at_a_time_than_allowed() -> None:
    limiter = Limiter(CallLimits(max_concurrency=3))
    running = most = 0

    async def call() -> None:
        nonlocal running, most
        async with limiter.turn(lane="run", num_tokens=1, patience_s=60.0):
            running += 1
            most = max(most, running)
            for _ in range(5):
                await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(call() for _ in range(20)))
    assert most == 3


async def test_who_waits_longer_than_the_patience_is_an_overload_and_leaves_its_place() -> None:
    limiter = Limiter(CallLimits(max_concurrency=1))
    async with limiter.turn(lane="run", num_tokens=1, patience_s=60.0):
        with pytest.raises(RewardFailure) as failure:
            async with limiter.turn(lane="run", num_tokens=1, patience_s=0.01):
                raise AssertionError("there was no place")
    assert failure.value.outcome == "overload"
    assert "HEADRACE_REWARD_LIMITS" in failure.value.detail
    async with limiter.turn(lane="run", num_tokens=1, patience_s=60.0):
        pass


async def test_a_limiter_waits_for_both_buckets_and_takes_from_neither_if_one_refuses() -> None:
    now_s = 0.0
    limiter = Limiter(CallLimits(requests_per_minute=20.0, tokens_per_minute=600.0), now_s=lambda: now_s)
    async with limiter.turn(lane="run", num_tokens=60, patience_s=60.0):
        pass
    with pytest.raises(RewardFailure):
        async with limiter.turn(lane="run", num_tokens=60, patience_s=0.01):
            raise AssertionError("the 60 tokens of six seconds are used up")
    async with limiter.turn(lane="run", num_tokens=0, patience_s=60.0):
        pass  # the second of the two requests of six seconds, which the refused call did not take
    with pytest.raises(RewardFailure):
        async with limiter.turn(lane="run", num_tokens=0, patience_s=0.01):
            raise AssertionError("both requests of six seconds are used up")
    now_s = 6.0
    async with limiter.turn(lane="run", num_tokens=60, patience_s=60.0):
        pass


async def test_a_function_that_raises_gives_its_place_back() -> None:
    limiter = Limiter(CallLimits(max_concurrency=1))
    for _ in range(2):
        with pytest.raises(ValueError, match="ill"):
            async with limiter.turn(lane="run", num_tokens=1, patience_s=60.0):
                raise ValueError("the judge is ill")


def test_tokens_are_ids_where_they_are_known_and_four_characters_where_not() -> None:
    call = RewardCall(prompts=["12345678", "1"], completions=["123456789", "12"], columns={})
    assert num_tokens(call) == 5, "20 characters"
    known = RewardCall(
        prompts=[[{"role": "user", "content": "12345"}]], completions=["a"], columns={}, completion_ids=[[1] * 7]
    )
    assert num_tokens(known) == 9, "7 ids, and 2 for the prompt's 5 characters"


@pytest.mark.parametrize("limits", [{"max_concurrency": 0}, {"requests_per_minute": 0}, {"requests_per_hour": 1}])
def test_limits_that_make_no_sense_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        CallLimits.model_validate(limits)
