"""Moves running generators to other places, one after another, so that somebody serves the run all the while.

A generator has to start again for that, and then has the model to load and the next push to wait for. So one that is
ready is moved when another is ready too, and the next one only when it is ready again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

_LOOK_EVERY_S = 0.2


class Movable(Protocol):
    """A generator."""

    async def is_ready(self) -> bool:
        """Return whether it serves the run."""
        ...

    async def move(self) -> None:
        """Start it again in its new place; returns once it was started."""
        ...


async def rearrange(moving: Sequence[Movable], *, others: Sequence[Movable], is_outdated: Callable[[], bool]) -> None:
    """Move each of ``moving``.

    Args:
        moving: Those in the wrong place.
        others: Those that stay, or have just been started.
        is_outdated: Whether the places are to be given out anew; what has not moved is then left where it is.
    """

    async def until(happened: Callable[[], Awaitable[bool]]) -> bool:
        """Return False if the rest is not to be moved any more."""
        while not is_outdated():
            if await happened():
                return True
            await asyncio.sleep(_LOOK_EVERY_S)
        return False

    for generator in moving:
        rest = [other for other in (*moving, *others) if other is not generator]
        serves = await generator.is_ready()

        async def can_be_spared(rest: Sequence[Movable] = rest, generator: Movable = generator) -> bool:
            return not await generator.is_ready() or any([await other.is_ready() for other in rest])

        if not await until(can_be_spared):
            return
        await generator.move()
        if serves and not await until(generator.is_ready):
            return
