"""Ends the work for a request when its client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from shared.serving.http_guard import Receive

HUNG_UP: Final = 499
"""The status of a request whose client has gone; only the log shows it."""
_ResultT = TypeVar("_ResultT")


async def unless_hung_up(receive: Receive, work: Coroutine[Any, Any, _ResultT]) -> _ResultT | None:
    """Return the result of ``work``. If the client disconnects first, cancel ``work`` and return None.

    Args:
        receive: The ASGI ``receive`` of the request, from which the whole body has been read.
        work: Computes the answer.
    """
    working = asyncio.create_task(work, name="work for a client")
    watching = asyncio.create_task(_hung_up(receive), name="is the client there")
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
