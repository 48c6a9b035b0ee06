"""Waits for a condition that another task or process will make true, instead of a fixed sleep."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable


async def eventually(is_true: Callable[[], object | Awaitable[object]], *, within_s: float = 120.0) -> None:
    """Return as soon as ``is_true()`` is true; fail after ``within_s``."""
    deadline = time.monotonic() + within_s
    while True:
        found = is_true()
        if await found if inspect.isawaitable(found) else found:
            return
        assert time.monotonic() < deadline, f"not true within {within_s} s"
        await asyncio.sleep(0.01)
