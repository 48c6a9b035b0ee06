"""The reward functions of the benchmark."""

import asyncio
from typing import Any


async def one_second(completions: list[Any], **columns: Any) -> list[float]:
    """Wait for a second, like a call to a judge."""
    del columns
    await asyncio.sleep(1.0)
    return [float(number) for number in range(len(completions))]


async def two_seconds(completions: list[Any], **columns: Any) -> list[float]:
    """Wait for two seconds, and return the same scores as `instant`."""
    await asyncio.sleep(2.0)
    return await instant_async(completions, **columns)


async def instant_async(completions: list[Any], **columns: Any) -> list[float]:
    """Return a different score for each completion of a group, on the event loop."""
    return instant(completions, **columns)


def instant(completions: list[Any], **columns: Any) -> list[float]:
    """Return a different score for each completion of a group, in a worker."""
    del columns
    return [float(number) for number in range(len(completions))]
