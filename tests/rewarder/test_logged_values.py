"""What reward functions log with TRL's log_metric and log_extra."""

import math
from typing import Any

import pytest

from services.rewarder.logged_values import LoggedValues
from services.rewarder.python_functions.loop_functions import answer_of
from services.rewarder.reward_call import RewardCall, Verdict, arguments_for, judge, with_logged

pytestmark = pytest.mark.unit

CALL = RewardCall(prompts=["a", "a"], completions=["5", "6"], columns={})


def parsed(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    log_extra("parsed", completions)
    log_extra("half", [2.5, None])
    log_metric("accuracy", 1)
    log_metric("accuracy", 0)
    return [1.0, 0.0]


def test_each_completion_has_its_own_extra_values_and_the_mean_of_every_metric() -> None:
    logged = LoggedValues()
    returned = parsed(**arguments_for(parsed, CALL, logged=logged))
    assert with_logged(judge(returned, 2), logged) == [
        Verdict("scored", 1.0, metrics={"accuracy": 0.5}, extra={"parsed": "5", "half": 2.5}),
        Verdict("scored", 0.0, metrics={"accuracy": 0.5}, extra={"parsed": "6"}),
    ]


async def test_async_functions_log_too() -> None:
    async def also(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        log_metric("accuracy", 0.25)
        return [1.0 for _ in completions]

    answer = await answer_of("m:also", also, CALL)
    assert [verdict.metrics for verdict in answer.verdicts] == [{"accuracy": 0.25}] * 2


def test_what_cannot_be_kept_is_left_out_and_fails_nothing() -> None:
    logged = LoggedValues()
    for value in (math.nan, math.inf, "x", None, 10**400):
        logged.log_metric("bad", value)
    logged.log_metric("n" * 101, 1.0)
    logged.log_extra("one", 7)
    logged.log_extra("long", ["x" * 600, ["a", 1], math.nan])
    assert logged.metrics() == {}
    assert [logged.extra_of(number) for number in range(4)] == [
        {"long": "x" * 500}, {"long": "['a', 1]"}, {"long": "nan"}, {},
    ]  # fmt: skip


def test_texts_that_cannot_be_encoded_and_objects_that_raise_fail_nothing() -> None:
    class Raises:
        def __str__(self) -> str:
            raise RuntimeError

    logged = LoggedValues()
    logged.log_extra("half", ["\ud800x", Raises()])
    logged.log_extra("\ud800", ["a"])
    logged.log_metric("large", 1e308)
    logged.log_metric("large", 1e308)
    assert [logged.extra_of(number) for number in range(2)] == [{"half": "?x"}, {}]
    assert logged.metrics() == {}


def test_the_number_of_names_is_bounded() -> None:
    logged = LoggedValues()
    for number in range(40):
        logged.log_metric(f"m{number}", number)
        logged.log_extra(f"e{number}", [number])
    assert (len(logged.metrics()), len(logged.extra_of(0))) == (32, 32)


def test_a_function_that_logs_nothing_keeps_its_verdicts() -> None:
    verdicts = judge([1.0, None], 2)
    assert with_logged(verdicts, LoggedValues()) == verdicts
