"""The scorer's counts and log lines for its sources' answers, and its sums. No processes."""

import asyncio
import contextlib
import tracemalloc
from collections.abc import Generator
from typing import Any, cast

import msgspec
import pytest

from services.rewarder.python_functions.loop_functions import LoopFunctions
from services.rewarder.python_functions.python_functions import PythonFunctions
from services.rewarder.reward_answer import Answer, Inspected
from services.rewarder.reward_call import RewardCall, Verdict
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.scoring import Scorer, WeightedFunction, weighted_sum
from shared.messages import Outcome, RewardOutcome
from shared.user_code.places import Places
from tests.eventually import eventually

pytestmark = pytest.mark.unit

CALL = RewardCall(prompts=["p"], completions=["c"], columns={})


class FakeSource:
    """Claims every name, but knows only ``judge``; scores 0.5, or fails."""

    def __init__(self, failure: RewardFailure | None = None) -> None:
        self.failure = failure

    async def knows(self, name: str) -> bool:
        return True

    def exists(self, name: str) -> bool:
        return name == "judge"

    async def inspect(self, name: str) -> Inspected:
        return Inspected("endpoint")

    async def call(self, name: str, call: RewardCall, *, timeout_s: float, lane: str) -> tuple[Answer, float]:
        if self.failure is not None:
            raise self.failure
        return Answer([Verdict("scored", 0.5)]), 2.0


def scorer(source: FakeSource, metrics: RewarderMetrics) -> Scorer:
    functions = PythonFunctions(
        cast("Any", None),
        loop_functions=LoopFunctions(places=Places(), import_timeout_s=60),
        import_timeout_s=60,
        check_timeout_s=60,
    )
    return Scorer(functions, metrics=metrics, sources=[source])


async def outcome_of(source: FakeSource, metrics: RewarderMetrics, name: str = "judge") -> RewardOutcome:
    ((outcome,),) = await scorer(source, metrics).score(CALL, [WeightedFunction(name)], timeout_s=60, lane="test")
    return outcome


def functions_shown(metrics: RewarderMetrics) -> set[str]:
    """Return the values of the label ``function`` in all metrics."""
    samples = [sample for metric in metrics.registry.collect() for sample in metric.samples]
    return {sample.labels["function"] for sample in samples if "function" in sample.labels}


async def test_unknown_names_share_one_label() -> None:
    metrics = RewarderMetrics()
    for name in ("judge", "org/one", "org/two"):
        await outcome_of(FakeSource(), metrics, name)
    assert functions_shown(metrics) == {"judge", "unknown"}


@pytest.mark.parametrize(
    ("failure", "seconds"),
    [
        (RewardFailure("overload", "no worker is free"), 0.0),
        (RewardFailure("timeout", "took longer than 30 s", seconds=30.0), 30.0),
    ],
)
async def test_the_time_of_a_failure_is_that_of_the_work_without_the_wait(
    failure: RewardFailure, seconds: float
) -> None:
    metrics = RewarderMetrics()
    outcome = await outcome_of(FakeSource(failure), metrics)
    assert (outcome.outcome, outcome.latency_s) == (failure.outcome, seconds)
    labels = {"function": "judge", "outcome": failure.outcome}
    assert metrics.registry.get_sample_value("headrace_reward_seconds_sum", labels) == seconds


async def test_an_endpoint_that_was_deleted_is_shown_no_more_and_begins_anew_under_its_name() -> None:
    metrics = RewarderMetrics()
    await outcome_of(FakeSource(), metrics)
    await outcome_of(FakeSource(RewardFailure("timeout", "took long", seconds=30.0)), metrics)
    metrics.observe_values("judge", [100.0])
    metrics.forget_endpoint("judge")
    assert functions_shown(metrics) == set()
    await outcome_of(FakeSource(), metrics)
    assert metrics.registry.get_sample_value("headrace_reward_value_mean", {"function": "judge"}) == 0.5


def outcome(value: float | None, weight: float = 1.0, kind: Outcome = "scored") -> RewardOutcome:
    return RewardOutcome("f", kind, value, weight, "", 0.0)


@pytest.mark.parametrize(
    ("outcomes", "total"),
    [
        ([outcome(1.0, 2.0), outcome(0.5)], 2.5),
        ([outcome(1.0), outcome(None, kind="not_applicable")], 1.0),
        ([outcome(None, kind="not_applicable")], None),
        ([outcome(1.0), outcome(None, kind="timeout")], None),
        ([outcome(1e308), outcome(1e308)], None),
        ([outcome(1e308, 10.0), outcome(1e308, -10.0)], None),
    ],
)
def test_a_sum_is_a_finite_number_or_none(outcomes: list[RewardOutcome], total: float | None) -> None:
    assert weighted_sum(outcomes) == total


class FakeFunctions(FakeSource):
    """Replaces the Python functions."""

    @contextlib.contextmanager
    def one_group(self) -> Generator[None]:
        yield


async def test_each_outage_of_a_python_function_is_logged_where_it_begins_and_where_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    functions = FakeFunctions()
    asked = Scorer(cast("PythonFunctions", functions), metrics=RewarderMetrics())

    async def logged_of(num_calls: int, failure: RewardFailure | None, name: str = "judge") -> list[str]:
        caplog.clear()
        functions.failure = failure
        for _ in range(num_calls):
            await asked.score(CALL, [WeightedFunction(name)], timeout_s=60, lane="test")
        return [record.getMessage().partition("\n")[0] for record in caplog.records]

    late = RewardFailure("timeout", "took longer than 30 s", seconds=30.0)
    begins = "reward judge failed 5 times in a row: timeout: took longer than 30 s"
    assert await logged_of(9, late) == ["reward judge: timeout: took longer than 30 s (logged once)", begins]
    assert [line.partition(":")[0] for line in await logged_of(9, None)] == ["reward judge works again"]
    assert await logged_of(9, late) == [begins]
    assert [line.partition(":")[0] for line in await logged_of(9, None)] == ["reward judge works again"]
    overload = await logged_of(9, RewardFailure("overload", "no worker is free"))
    assert overload == ["reward judge: overload: no worker is free (logged once)"], "an overload is not an outage"
    unknown = RewardFailure("error", "it does not exist")
    assert await logged_of(9, unknown, "org/one") == ["reward org/one: error: it does not exist (logged once)"]


async def test_a_function_that_fails_for_some_completions_of_each_group_is_not_out_of_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class HalfOfIt(FakeFunctions):
        async def call(self, name: str, call: RewardCall, *, timeout_s: float, lane: str) -> tuple[Answer, float]:
            return Answer([Verdict("scored", 0.5), Verdict("invalid", None, "returned nan")]), 2.0

    asked = Scorer(cast("PythonFunctions", HalfOfIt()), metrics=RewarderMetrics())
    call = RewardCall(prompts=["p", "p"], completions=["c", "d"], columns={})
    for _ in range(9):
        await asked.score(call, [WeightedFunction("judge")], timeout_s=60, lane="test")
    logged = [record.getMessage().partition("\n")[0] for record in caplog.records]
    assert logged == ["reward judge: invalid: returned nan (logged once)"]


class BusyPool:
    """Workers that are all busy until the test frees them."""

    def __init__(self) -> None:
        self.waiting: list[bytes] = []
        self.are_free = asyncio.Event()

    async def call(self, _name: str, call: bytes, **_more: Any) -> tuple[Answer, float]:
        self.waiting.append(call)
        await self.are_free.wait()
        return Answer([Verdict("scored", 1.0)]), 0.0


async def test_functions_that_wait_for_workers_share_one_copy_of_a_large_call() -> None:
    pool = BusyPool()
    loop_functions = LoopFunctions(places=Places(), import_timeout_s=60)
    functions = PythonFunctions(
        cast("Any", pool), loop_functions=loop_functions, import_timeout_s=60, check_timeout_s=60
    )
    scorer = Scorer(functions, metrics=RewarderMetrics())
    call = RewardCall(["p"], ["c"], {"words": [[f"the word {number:010}" for number in range(100_000)]]})
    num_bytes = len(msgspec.msgpack.encode(call))
    tracemalloc.start()
    try:
        names = [WeightedFunction("think_format_reward")] * 64
        scoring = asyncio.create_task(scorer.score(call, names, timeout_s=60, lane="test"))
        await eventually(lambda: len(pool.waiting) == len(names))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 4 * num_bytes
    assert len({id(waiting) for waiting in pool.waiting}) == 1
    pool.are_free.set()
    assert [outcome.value for outcome in (await scoring)[0]] == [1.0] * len(names)
