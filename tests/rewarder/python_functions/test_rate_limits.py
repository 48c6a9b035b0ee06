"""Rate limits of a function, and what counts as a token."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from services.rewarder.python_functions.rate_limits import CallLimits, FunctionLimits
from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.token_estimate import num_tokens
from shared.arrays import pack_ids

pytestmark = pytest.mark.unit

CALL = RewardCall(prompts=["p"], completions=["c"], columns={}, completion_ids=[pack_ids([1] * 60)])


def limits_of(*, queue_timeout_s: float = 60.0, **allowed: int) -> FunctionLimits:
    metrics = RewarderMetrics(CollectorRegistry())
    return FunctionLimits(
        {"judge": CallLimits.model_validate(allowed)}, queue_timeout_s=queue_timeout_s, metrics=metrics
    )


async def test_no_more_calls_at_a_time_than_allowed() -> None:
    limits = limits_of(max_concurrency=3)
    running = most = 0

    async def call(name: str) -> int:
        nonlocal running, most
        async with limits.turn(name, CALL, lane="run"):
            running += 1
            most = max(most, running)
            for _ in range(5):
                await asyncio.sleep(0)
            running -= 1
        return most

    await asyncio.gather(*(call("judge") for _ in range(20)))
    assert most == 3
    await asyncio.gather(*(call("unlimited") for _ in range(20)))
    assert most == 20


@pytest.mark.parametrize("allowed", [{"requests_per_minute": 2}, {"tokens_per_minute": 125}])
async def test_a_call_that_does_not_fit_into_the_minute_is_an_overload_with_the_reason(allowed: dict[str, int]) -> None:
    limits = limits_of(queue_timeout_s=0.01, **allowed)
    for _ in range(2):  # with 61 tokens each
        async with limits.turn("judge", CALL, lane="run"):
            pass
    with pytest.raises(RewardFailure) as failure:
        async with limits.turn("judge", CALL, lane="run"):
            raise AssertionError("the minute was full")
    assert failure.value.outcome == "overload"
    of_what = "2 a minute" if "requests_per_minute" in allowed else "125 tokens a minute"
    assert failure.value.detail == f"waited 0.01 s for its turn: {of_what} (HEADRACE_REWARD_LIMITS)"


async def test_a_function_that_raises_gives_its_place_back() -> None:
    limits = limits_of(max_concurrency=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="ill"):
            async with limits.turn("judge", CALL, lane="run"):
                raise ValueError("the judge is ill")


def test_tokens_are_ids_where_they_are_known_and_four_characters_where_not() -> None:
    call = RewardCall(prompts=["12345678", "1"], completions=["123456789", "12"], columns={})
    assert num_tokens(call) == 5, "20 characters"
    known = RewardCall(
        prompts=[[{"role": "user", "content": "12345"}]],
        completions=["a"],
        columns={},
        completion_ids=[pack_ids([1] * 7)],
    )
    assert num_tokens(known) == 9, "7 ids, and 2 for the prompt's 5 characters"


@pytest.mark.parametrize("limits", [{"max_concurrency": 0}, {"requests_per_minute": 0}, {"requests_per_hour": 1}])
def test_limits_that_make_no_sense_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        CallLimits.model_validate(limits)
