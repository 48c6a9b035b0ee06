"""Edge cases of a call to a module's event loop and of its result."""

import asyncio
import threading

import pytest

from services.rewarder.python_functions.module_loop import ModuleLoop, NoAnswer
from services.rewarder.reward_answer import Answer
from tests.eventually import eventually

pytestmark = pytest.mark.unit

ANSWER = Answer([])


async def answer() -> Answer:
    return ANSWER


async def test_calls_of_one_turn_are_all_answered() -> None:
    loop = ModuleLoop("rewards")
    assert await asyncio.gather(*(loop.run("f", answer, timeout_s=60) for _ in range(100))) == [ANSWER] * 100
    await loop.close()
    await eventually(lambda: not loop.is_alive)


async def test_a_loop_that_is_given_up_with_a_call_on_its_way_that_is_over_ends() -> None:
    loop = ModuleLoop("rewards")
    is_blocked, go = threading.Event(), threading.Event()

    def block() -> None:
        is_blocked.set()
        go.wait()

    async def blocks_afterwards() -> Answer:
        asyncio.get_running_loop().call_later(0.01, block)
        return ANSWER

    assert await loop.run("f", blocks_afterwards, timeout_s=60) is ANSWER
    await eventually(is_blocked.is_set)
    late = asyncio.create_task(loop.run("f", answer, timeout_s=60))
    await asyncio.sleep(0)
    loop.give_up()
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    go.set()
    await eventually(lambda: not loop.is_alive)


async def test_a_call_in_the_turn_in_which_the_loop_has_closed_ends_at_once() -> None:
    loop = ModuleLoop("rewards")
    await loop.close()
    assert await asyncio.wait_for(loop.run("f", answer, timeout_s=60), 120) is NoAnswer.CANCELLED
