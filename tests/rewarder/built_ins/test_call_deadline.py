"""The built-in functions that limit their steps keep the deadline of their call, so that it loses no judgement."""

import time
from typing import Any

import msgspec
import pytest

from services.rewarder.python_functions.reward_tasks import RewardTasks
from services.rewarder.reward_answer import Answer
from services.rewarder.reward_call import RewardCall
from shared.user_code.limits import Limits

pytestmark = pytest.mark.unit

SLOW, PLAIN, PATTERN = "a" * 40 + "!", "b", "(a+)+$|^b$"
SCHEMA = {"type": "string", "pattern": PATTERN}


@pytest.fixture(autouse=True)
def clock_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", time.thread_time)


def answered(name: str, kwargs: dict[str, Any], *completions: str, timeout_s: float) -> Answer:
    """Return what the function answers as a worker calls it, after checking that it keeps the deadline."""
    call = RewardCall(["p"] * len(completions), [*completions], {}, reward_kwargs={name: kwargs}, timeout_s=timeout_s)
    tasks = RewardTasks()
    function = tasks.load(name, None)
    began_at_s = time.thread_time()
    answer = tasks.call(name, function, msgspec.Raw(msgspec.msgpack.encode(call)), Limits(2**30, 64))
    assert time.thread_time() - began_at_s < timeout_s
    return answer


@pytest.mark.parametrize(
    ("name", "kwargs", "quote"),
    [("regex_reward", {"pattern": PATTERN}, ""), ("json_schema_reward", {"json_schema": SCHEMA}, '"')],
)
def test_slow_completions_leave_the_deadline_to_the_others(name: str, kwargs: dict[str, Any], quote: str) -> None:
    completions = [f"{quote}{text}{quote}" for text in (SLOW, SLOW, SLOW, PLAIN)]
    answer = answered(name, kwargs, *completions, timeout_s=1.0)
    assert [verdict.outcome for verdict in answer.verdicts] == ["timeout"] * 3 + ["scored"]
    assert answer.verdicts[-1].value == 1.0


def test_a_call_with_too_many_slow_completions_keeps_what_was_judged_in_time() -> None:
    answer = answered("regex_reward", {"pattern": PATTERN}, PLAIN, *[SLOW] * 40, timeout_s=0.5)
    assert [verdict.outcome for verdict in answer.verdicts] == ["scored"] + ["timeout"] * 40
    says = "the pattern was not tried: other completions of the call took the time until its deadline"
    assert answer.verdicts[-1].detail == says
