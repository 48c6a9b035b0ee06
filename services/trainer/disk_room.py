"""Retries a write while the disk is full, so that a full disk does not end a run.

    write --disk full--> partial output removed --> reported in the run's progress --> retried until it fits

Use it only for writes that can be repeated from the beginning. The disk counts as full if the file system has no space
or a quota is used up. A read-only file system is not waited for, because it does not recover by itself.
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
# Errors from another rank, or from a library that is not written in Python, have lost their errno.
_SAYS_FULL = ("No space left on device", "Disk quota exceeded", "os error 28", "os error 122")
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.5, 10.0
_LOG_EVERY_S = 60.0


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or one of its causes, says that the disk is full or a quota is used up."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and (found.errno in _FULL or any(says in str(found) for says in _SAYS_FULL)):
            return True
        found = found.__cause__
    return False


def room_for(what: str, where: Path) -> str:
    """Return a phrase that names the full disk and a remedy. It completes a sentence that begins "waiting for"."""
    return f"space for {what} on the disk of {where}, which is full: delete unneeded files, or enlarge the disk"


class Room:
    """Repeats the writes of one training rank while the disk is full, and knows which writes wait for space.

    Args:
        terminate: Set when this process is asked to end. Waiting then stops.
    """

    def __init__(self, terminate: asyncio.Event | None = None) -> None:
        self._terminate = terminate or asyncio.Event()
        self._missing: dict[str, str] = {}
        self._log_at = 0.0
        self.tell: Callable[[str], Awaitable[None]] | None = None
        """Called with the description of what is missing, when no training loop reports progress."""

    @property
    def missing(self) -> str:
        """The description of a write that waits for space; empty if no write waits."""
        return next(iter(self._missing.values()), "")

    async def write(self, work: Callable[[], _ResultT], *, what: str, where: Path) -> _ResultT:
        """Run ``work`` in a thread, and repeat it while the disk is full.

        Args:
            work: Writes to the disk, and removes its partial output when it fails.
            what: Name of the output, for log lines and error messages.
            where: The directory that ``work`` writes to.

        Raises:
            OSError: The write failed for another reason.
            UnavailableError: This process was asked to end while the disk was full.
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
        """Report that the disk is full, wait ``backoff_s`` seconds, and return the next backoff: double, at most 10 s.

        Raises:
            UnavailableError: This process was asked to end.
        """
        await self.note(what=what, where=where)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(backoff_s):
                await self._terminate.wait()
                raise UnavailableError(f"asked to end while the disk of {where} had no space for {what}")
        return min(2 * backoff_s, _LAST_BACKOFF_S)

    async def note(self, *, what: str, where: Path) -> None:
        """Record that a write waits for disk space, log it at most once a minute, and pass it to ``tell`` if set."""
        self._missing[what] = says = room_for(what, where)
        if time.monotonic() >= self._log_at:
            log.warning("the run waits for %s", says)
            self._log_at = time.monotonic() + _LOG_EVERY_S
        if self.tell is not None:
            await self.tell(says)

    def found(self, what: str) -> None:
        """Record that a write has succeeded, and log it if the write had waited for space."""
        if self._missing.pop(what, None) is not None:
            log.info("the disk has space again: %s was written", what)
