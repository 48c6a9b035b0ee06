"""Runs blocking work in a thread that can be abandoned, and for which the process does not wait at exit.

A thread cannot be killed, and after ``asyncio.to_thread`` the process would wait at exit until the work has ended. A
daemon thread is abandoned instead, so the work must be safe to cut off at any moment.
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

_LOOK_EVERY_S = 0.02
_ResultT = TypeVar("_ResultT")


def started(work: Callable[[], _ResultT], *, name: str) -> "Future[_ResultT]":
    """Start ``work`` in a daemon thread of this name, and return the future of its result."""
    result: Future[_ResultT] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised where the result is read
            result.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name=name, daemon=True).start()
    return result


async def in_thread(
    work: Callable[[], _ResultT], *, name: str, timeout_s: float | None = None, places: asyncio.Semaphore | None = None
) -> _ResultT:
    """Run ``work`` beside the event loop, and return its result or raise its exception.

    Args:
        work: The work.
        name: Name of the thread.
        timeout_s: Longest time until the result, in seconds, with the wait for a place.
        places: Limits how much work is under way. Work that was abandoned keeps its place until it has ended.

    Raises:
        TimeoutError: ``work`` was not done after ``timeout_s`` seconds. It may go on, but its result is dropped.
    """
    async with asyncio.timeout(timeout_s):
        if places is None:
            return await asyncio.wrap_future(started(work, name=name))
        loop = asyncio.get_running_loop()

        def release(_: "Future[_ResultT]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(places.release)

        await places.acquire()
        result = started(work, name=name)
        result.add_done_callback(release)
        return await asyncio.wrap_future(result)


def abandonable(work: Callable[[], _ResultT], check: Callable[[], None], *, name: str) -> _ResultT:
    """Run ``work`` and return its result, calling ``check`` every 20 ms meanwhile.

    If ``check`` raises, the thread is abandoned and the error is passed on.
    """
    check()
    result = started(work, name=name)
    while not wait([result], timeout=_LOOK_EVERY_S).done:
        check()
    return result.result()
