"""Runs Outgoing's blocking work in threads, each call under the deadline of its push attempt.

A thread cannot be killed. When the deadline passes while a thread reads weights, it is asked to stop, and ends at the
next parameter, because the weights are about to change. A thread that writes or removes files works on copies and may
go on after the deadline. Later reads and writes wait until it has ended.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

from services.trainer.deadline_thread import in_thread
from services.trainer.push.blame import SETTLE_S, AttemptError
from services.trainer.push.outgoing import Outgoing
from services.trainer.push.packing import Announcement, Parcel, Weights
from shared.control import Transport
from shared.weights.weight_store import StoreError

_ResultT = TypeVar("_ResultT")


class Parcels:
    """Prepares, writes and removes the weights of each push, in threads.

    Args:
        outgoing: Does the blocking work.
    """

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing

    @property
    def run_dir(self) -> str | None:
        """The directory of the run's versions; None unless the transport is disk."""
        return self._outgoing.run_dir

    def reads_before_begin(self, transport: Transport) -> bool:
        """Return whether ``prepare`` reads the weights; if not, the broadcast does."""
        return self._outgoing.is_compared(transport)

    async def prepare(
        self,
        weights: Weights,
        announced: Announcement,
        *,
        policy_version: int,
        transport: Transport,
        staged: Collection[str | None],
        deadline: float,
    ) -> Parcel:
        """Return what to send. See ``Outgoing.prepare``.

        Raises:
            AttemptError: The reading, or earlier work, was not done by the deadline.
            PushError: The weights differ from the announcement.
        """
        given_up = threading.Event()

        def work() -> Parcel:
            return self._outgoing.prepare(
                weights,
                announced,
                policy_version=policy_version,
                transport=transport,
                staged=staged,
                deadline=deadline,
                given_up=given_up,
            )

        try:
            return await self._under(work, deadline=deadline, what="reading the weights")
        except AttemptError:
            given_up.set()
            until = time.monotonic() + SETTLE_S
            await asyncio.to_thread(partial(self._outgoing.wait_until_idle, deadline=until))
            raise
        finally:
            given_up.set()

    async def write(self, parcel: Parcel, *, incarnation: int, deadline: float) -> Parcel:
        """Write a parcel to disk and return it with its place. See ``Outgoing.write``.

        Raises:
            AttemptError: The parcel was not written by the deadline, or cannot be written.
            UserError: ``weight_dir`` needs a package that is not installed.
        """
        return await self._under(
            lambda: self._outgoing.write(parcel, incarnation=incarnation, deadline=deadline),
            deadline=deadline,
            what=f"writing the weights to {self._outgoing.run_dir}",
        )

    async def remove_old(self, *, deadline: float) -> None:
        """Remove versions that are no longer needed, if a version was written since.

        Work past the deadline goes on in its thread, beside the run.
        """
        if self._outgoing.has_old:
            with contextlib.suppress(AttemptError):
                work = partial(self._outgoing.remove_old, deadline=deadline)
                await self._under(work, deadline=deadline, what="removing old weights")

    def distrust(self) -> None:
        """Record that a replica could not read what was written: the next version is written in full."""
        self._outgoing.distrust()

    async def _under(self, work: Callable[[], _ResultT], *, deadline: float, what: str) -> _ResultT:
        try:
            return await in_thread(work, timeout_s=max(deadline - time.monotonic(), 0.0), name=what)
        except TimeoutError as error:
            raise AttemptError(f"{what} did not end by the deadline of the push", blamed={}) from error
        except StoreError as error:
            raise AttemptError(str(error), blamed={}) from error
