"""Moves running generators to other cores, one after another, so that the run is served all the time.

A generator has to restart for the move. It then loads its model and waits for the next push before it is ready again.
So a ready generator is moved only while another one is ready, and the next move waits until it is ready again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

_LOOK_EVERY_S = 0.2


class Movable(Protocol):
    """A generator that can be moved."""

    async def is_ready(self) -> bool:
        """Return whether the generator serves the run."""
        ...

    async def move(self) -> None:
        """Restart the generator in its new place; return once it was started."""
        ...


async def rearrange(moving: Sequence[Movable], *, others: Sequence[Movable], is_outdated: Callable[[], bool]) -> None:
    """Move each generator of ``moving``.

    Args:
        moving: Generators in the wrong place.
        others: Generators that stay or have just been started.
        is_outdated: Whether new places are about to be assigned. If so, the remaining generators are not moved.
    """

    async def until(happened: Callable[[], Awaitable[bool]]) -> bool:
        """Wait until ``happened``; return False if the places are outdated before that."""
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
