"""Waits until the first of several coroutines finishes, and cancels the others."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_of(*waits: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> int | None:
    """Return the index of the first coroutine to finish; None after ``timeout_s`` seconds. Cancel unfinished ones.

    Raises:
        BaseException: The first coroutine finished with this exception.
    """
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(wait, name=f"wait {position} of {len(waits)}") for position, wait in enumerate(waits)
    ]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for position, task in enumerate(tasks):
            if task in done:
                task.result()
                return position
        return None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
