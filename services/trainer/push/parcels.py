"""Outgoing's work beside the event loop, each piece of it under the deadline of the push attempt it is for.

A thread cannot be killed. One that reads weights when its deadline passes is told, and ends at the next parameter: they
are about to change. One that writes files or removes them works on copies, and may end later, while whoever wants to
read or write after it waits for its turn.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

from services.trainer.push.deadline_thread import in_thread
from services.trainer.push.outgoing import Outgoing
from services.trainer.push.packing import Announcement, Weights
from services.trainer.push.parcel import Parcel
from services.trainer.push.push_attempt import SETTLE_S, AttemptError
from shared.control import Transport
from shared.weight_store import StoreError

_ResultT = TypeVar("_ResultT")


class Parcels:
    """What is sent, made in threads.

    Args:
        outgoing: Makes it.
    """

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing

    @property
    def run_dir(self) -> str | None:
        """For disk: where versions are written."""
        return self._outgoing.run_dir

    def reads_before_begin(self, transport: Transport) -> bool:
        """Return whether ``prepare`` reads the weights, rather than the broadcast."""
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
        """See Outgoing.

        Raises:
            AttemptError: It was not done by the deadline, or what was asked for before is not done yet.
            PushError: The weights are not what was announced.
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
        """See Outgoing.

        Raises:
            AttemptError: It was not done by the deadline, or cannot be done.
            UserError: ``weight_dir`` needs a package that is not here.
        """
        return await self._under(
            lambda: self._outgoing.write(parcel, incarnation=incarnation, deadline=deadline),
            deadline=deadline,
            what=f"writing the weights to {self._outgoing.run_dir}",
        )

    async def remove_old(self, *, deadline: float) -> None:
        """Remove versions that nobody needs, if one was written since. What takes longer goes on beside the run."""
        if self._outgoing.has_old:
            with contextlib.suppress(AttemptError):
                work = partial(self._outgoing.remove_old, deadline=deadline)
                await self._under(work, deadline=deadline, what="removing old weights")

    def distrust(self) -> None:
        """Take note that somebody could not read what was written: the next version is written in full."""
        self._outgoing.distrust()

    async def _under(self, work: Callable[[], _ResultT], *, deadline: float, what: str) -> _ResultT:
        try:
            return await in_thread(work, timeout_s=max(deadline - time.monotonic(), 0.0), name=what)
        except TimeoutError as error:
            raise AttemptError(f"{what} did not end by the deadline of the push", blamed={}) from error
        except StoreError as error:
            raise AttemptError(str(error), blamed={}) from error
