"""Loading a run's tools, environments and agent."""

import asyncio

import pytest

from services.sessions.run_code import at_the_same_time
from shared.errors import UserError


async def unusable() -> None:
    raise UserError("no such tool")


async def test_a_cancellation_is_not_lost_while_the_others_end_after_an_error() -> None:
    is_closing, may_close = asyncio.Event(), asyncio.Event()

    async def closes_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_closing.set()
            await may_close.wait()

    loading = asyncio.create_task(at_the_same_time(unusable(), closes_slowly()), name="loading")
    await is_closing.wait()
    loading.cancel()
    may_close.set()
    await asyncio.wait({loading})
    assert loading.cancelled()


async def test_the_error_of_the_one_that_fails_is_raised_when_the_others_have_ended() -> None:
    num_ended = 0

    async def ends() -> None:
        nonlocal num_ended
        try:
            await asyncio.Event().wait()
        finally:
            num_ended += 1

    with pytest.raises(UserError, match="no such tool"):
        await at_the_same_time(ends(), unusable(), ends())
    assert num_ended == 2
    assert await at_the_same_time() == []
