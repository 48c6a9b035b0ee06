"""Waits for whichever comes first."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_of(*waits: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> int | None:
    """Return the position of a wait that is over, or None after ``timeout_s``; the others are cancelled.

    Raises:
        BaseException: What that wait raised.
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
