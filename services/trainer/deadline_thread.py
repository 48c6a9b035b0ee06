"""Runs blocking work beside the event loop, under a deadline that also holds at shutdown.

A thread cannot be killed, and after ``asyncio.to_thread`` the process would wait at exit until the work has ended. A
daemon thread is abandoned instead, so the work must be safe to cut off at any moment.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

_ResultT = TypeVar("_ResultT")


async def in_thread(work: Callable[[], _ResultT], *, timeout_s: float, name: str) -> _ResultT:
    """Run ``work`` in a daemon thread, and return its result or raise its exception.

    Raises:
        TimeoutError: ``work`` was not done after ``timeout_s`` seconds. It may go on, but its result is dropped.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_ResultT] = loop.create_future()

    def settle(result: _ResultT | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:  # noqa: BLE001  raised in the awaiting task
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has closed: no task waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    async with asyncio.timeout(timeout_s):
        return await done
