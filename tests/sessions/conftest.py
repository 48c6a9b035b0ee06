"""What every test of the sessions service needs."""

import asyncio
from collections.abc import AsyncGenerator

import pytest


@pytest.fixture(autouse=True)
async def environments_have_ended() -> AsyncGenerator[None]:
    """Wait for the ends of environments, which rollouts do not wait for: the test's event loop does not outlive it."""
    yield
    ending = [task for task in asyncio.all_tasks() if task.get_name().startswith("end of a ")]
    if ending:
        await asyncio.wait(ending)
