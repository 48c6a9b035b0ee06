"""A task that must not be left half done is waited for, also by a caller that is cancelled."""

import asyncio

import pytest

from shared.service.cancellation import raise_if_cancelled, seen_through

pytestmark = pytest.mark.unit


async def test_the_result_and_the_error_of_the_task_are_those_of_the_call() -> None:
    assert await seen_through(asyncio.create_task(asyncio.sleep(0, "done"))) == "done"
    with pytest.raises(TimeoutError):
        await seen_through(asyncio.create_task(_timed_out()))


async def test_a_caller_that_is_cancelled_twice_still_waits_for_the_task() -> None:
    may_end = asyncio.Event()
    task = asyncio.create_task(may_end.wait())
    waiting = asyncio.create_task(seen_through(task))
    for _ in range(2):
        await _turns()
        waiting.cancel()
    await _turns()
    assert not waiting.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert task.result()


async def test_a_cancellation_that_a_task_group_has_forgotten_is_raised_again() -> None:
    is_ending, may_end = asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            await seen_through(asyncio.create_task(may_end.wait()))

    async def serve() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(slow_to_end())
                tasks.create_task(_timed_out())
        except* TimeoutError:
            pass
        raise_if_cancelled()
        await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    await asyncio.wait_for(is_ending.wait(), 120)
    serving.cancel()
    await _turns()
    may_end.set()
    await asyncio.wait({serving}, timeout=120)
    assert serving.cancelled()


async def _timed_out() -> None:
    raise TimeoutError


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
