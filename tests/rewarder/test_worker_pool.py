"""Queueing in front of the workers: fair between lanes, bounded, and no part of a function's deadline."""

import asyncio
import os
import signal

import msgspec
import pytest

from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.worker_pool import RewardFailure, WorkerPool
from tests.rewarder.conftest import LIMITS, call_with, descendants, is_worker, until, user


def one_worker(
    metrics: RewarderMetrics, *, queue_timeout_s: float = 30.0, import_timeout_s: float = 30.0
) -> WorkerPool:
    return WorkerPool(
        num_workers=1,
        limits=LIMITS,
        queue_timeout_s=queue_timeout_s,
        import_timeout_s=import_timeout_s,
        metrics=metrics,
    )


ONE = msgspec.msgpack.encode(call_with("a"))


async def test_a_lane_with_one_call_does_not_wait_for_the_queue_of_another(metrics: RewarderMetrics) -> None:
    finished: list[str] = []

    async def call(pool: WorkerPool, lane: str) -> None:
        await pool.call(user("one"), ONE, lane=lane, timeout_s=10)
        finished.append(lane)

    async with one_worker(metrics) as pool:
        await asyncio.gather(*(call(pool, "busy") for _ in range(8)), call(pool, "quiet"))
    assert finished.index("quiet") <= 2, finished
    assert finished.count("busy") == 8


async def test_the_deadline_does_not_run_while_a_call_queues(metrics: RewarderMetrics) -> None:
    async with one_worker(metrics) as pool:
        hanging = asyncio.create_task(pool.call(user("hangs"), ONE, lane="a", timeout_s=4.0))
        patient = asyncio.create_task(pool.call(user("one"), ONE, lane="b", timeout_s=3.0))
        answer, seconds = await patient
        assert hanging.done(), "the call did not queue, so this test shows nothing"
        with pytest.raises(RewardFailure, match="took longer than 4 s"):
            await hanging
    assert answer.verdicts[0].value == 1.0
    assert seconds < 3.0


async def test_a_call_that_no_worker_gets_free_for_is_overload(metrics: RewarderMetrics) -> None:
    async with one_worker(metrics, queue_timeout_s=0.2) as pool:
        hanging = asyncio.create_task(pool.call(user("hangs"), ONE, lane="a", timeout_s=60))
        await asyncio.sleep(0)
        with pytest.raises(RewardFailure) as caught:
            await pool.call(user("one"), ONE, lane="b", timeout_s=5)
        assert caught.value.outcome == "overload"
        assert not hanging.done()
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)


async def test_a_module_that_never_finishes_importing_is_a_timeout_and_its_worker_is_replaced(
    metrics: RewarderMetrics,
) -> None:
    async with one_worker(metrics, import_timeout_s=4.0) as pool:
        with pytest.raises(RewardFailure, match="importing its module took longer than 4 s"):
            await pool.call("hanging_rewards:f", ONE, lane="a", timeout_s=0.1)
        answer, _ = await pool.call(user("one"), ONE, lane="a", timeout_s=10)
    assert answer.verdicts[0].value == 1.0


async def test_a_call_that_is_cancelled_gives_its_worker_back_as_a_new_one(metrics: RewarderMetrics) -> None:
    async with one_worker(metrics) as pool:
        hanging = asyncio.create_task(pool.call(user("hangs"), ONE, lane="a", timeout_s=60))
        for _ in range(3):
            await asyncio.sleep(0)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        answer, _ = await pool.call(user("one"), ONE, lane="a", timeout_s=10)
    assert answer.verdicts[0].value == 1.0


async def test_a_worker_that_died_while_idle_is_replaced_before_its_next_call(metrics: RewarderMetrics) -> None:
    before = descendants(os.getpid())
    async with one_worker(metrics) as pool:
        (worker,) = [pid for pid in descendants(os.getpid()) - before if is_worker(pid)]
        os.kill(worker, signal.SIGKILL)

        async def is_noticed() -> bool:
            return pool.num_alive == 0

        await until(is_noticed, what="the end of the worker")
        answer, _ = await pool.call(user("one"), ONE, lane="a", timeout_s=10)
        assert answer.verdicts[0].value == 1.0
