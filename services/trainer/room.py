"""Waits for room on a disk that is full, as everything waits for a full Redis: a run must not end for it.

    write --no room--> its half removed --> said in the run's progress --> tried again, until it fits

Only for what may be done again from the beginning. Full is a file system without space or a quota that is used up. One
that is read-only is not waited for: it does not mend itself.
"""

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from shared.errors import UnavailableError

log = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# What comes from another rank, or from a library that is not written in Python, has lost its number.
_SAYS_FULL = ("No space left on device", "Disk quota exceeded", "os error 28", "os error 122")
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.5, 10.0
_LOG_EVERY_S = 60.0


def is_disk_full(error: BaseException) -> bool:
    """Whether something could not be written because there was no room for it."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and (found.errno in _FULL or any(says in str(found) for says in _SAYS_FULL)):
            return True
        found = found.__cause__
    return False


def room_for(what: str, where: Path) -> str:
    """Return what is waited for, to stand after 'waiting for'."""
    return f"room on the disk of {where}, which is full, for {what}: delete what is not needed, or make it larger"


class Room:
    """What one training rank waits for room for.

    Args:
        terminate: Set when this process was asked to end, which then waits no longer.
    """

    def __init__(self, terminate: asyncio.Event | None = None) -> None:
        self._terminate = terminate or asyncio.Event()
        self._missing: dict[str, str] = {}
        self._log_at = 0.0
        self.tell: Callable[[str], Awaitable[None]] | None = None
        """Told what is missing, while nobody reports progress."""

    @property
    def missing(self) -> str:
        """What is full, and for what there is no room; empty if nothing is."""
        return next(iter(self._missing.values()), "")

    async def write(self, work: Callable[[], _ResultT], *, what: str, where: Path) -> _ResultT:
        """Do ``work`` in a thread, again and again while there is no room for it.

        Args:
            work: Writes, and leaves nothing behind when it fails.
            what: Its name, for people.
            where: The directory that it writes to.

        Raises:
            OSError: It failed for another reason.
            UnavailableError: This process was asked to end, and there was still no room.
        """
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                result = await asyncio.to_thread(work)
            except OSError as error:
                if not is_disk_full(error):
                    raise
                backoff_s = await self.wait(what=what, where=where, backoff_s=backoff_s)
            else:
                self.found(what)
                return result

    async def wait(self, *, what: str, where: Path, backoff_s: float = _FIRST_BACKOFF_S) -> float:
        """Say that there is no room, and wait before the next try; returns how long to wait then.

        Raises:
            UnavailableError: This process was asked to end.
        """
        await self.note(what=what, where=where)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(backoff_s):
                await self._terminate.wait()
                raise UnavailableError(f"asked to end while there was no room for {what} in {where}")
        return min(2 * backoff_s, _LAST_BACKOFF_S)

    async def note(self, *, what: str, where: Path) -> None:
        """Say that there is no room."""
        self._missing[what] = says = room_for(what, where)
        if time.monotonic() >= self._log_at:
            log.warning("the run waits for %s", says)
            self._log_at = time.monotonic() + _LOG_EVERY_S
        if self.tell is not None:
            await self.tell(says)

    def found(self, what: str) -> None:
        """Say that there was room."""
        if self._missing.pop(what, None) is not None:
            log.info("there is room again: %s was written", what)
