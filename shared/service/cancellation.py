"""Waits for tasks that must not be left half done, and looks for cancellations that got lost."""

import asyncio
import contextlib
from typing import TypeVar

_ResultT = TypeVar("_ResultT")


async def seen_through(task: "asyncio.Task[_ResultT]") -> _ResultT:
    """Return the result of a task, or raise its exception. If cancelled, once or repeatedly, wait for its end first.

    The task must end by itself: this waits as long as it runs.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        raise


def is_being_cancelled() -> bool:
    """Whether the current task itself is being cancelled, and not only a task that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task is being cancelled.

    Before Python 3.13, a TaskGroup forgets a cancellation that comes while it waits for its tasks after an error.
    """
    if is_being_cancelled():
        raise asyncio.CancelledError
