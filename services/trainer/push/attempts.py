"""Makes the attempts of one push: retries once, without the replicas that caused the first attempt to fail.

    probe being computed --+
    join, begin -----------+--> broadcast --> not fenced off? --> commit
    disk: probe --> read, write --> join, begin -----------^

Weights are read after the probe is computed. With several training ranks both use collectives, which must not run
beside each other or beside the push. With a single rank and gloo, the probe may be computed while the weights are sent;
it is ready before the commits. If an attempt fails before its commits, its members are asked to abort and keep serving
the weights they hold.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import Protocol

import torch

from services.trainer.push.blame import AttemptError
from services.trainer.push.communicator_epochs import CommunicatorEpochs
from services.trainer.push.outgoing import Outgoing
from services.trainer.push.packing import Announcement, Parcel, Weights
from services.trainer.push.prober import StartedProbe
from services.trainer.push.push_attempt import PushAttempt
from services.trainer.push.push_result import PushResult
from services.trainer.push.replicas import Fleet, Member, Replica
from shared.control import AbortRequest, ReplicaInfo
from shared.errors import HeadraceError

log = logging.getLogger(__name__)

_NUM_ATTEMPTS = 2
_ABORT_TIMEOUT_S = 5.0


class Reconcile(Protocol):
    """Asks all live replicas for their state."""

    async def __call__(self, *, without: Collection[str]) -> Fleet:
        """Return the fleet, except the replicas in ``without``."""
        ...


class Attempts:
    """Makes the attempts of one trainer incarnation.

    Args:
        run_id: The run's id.
        incarnation: This trainer's incarnation.
        epochs: Its communicators.
        outgoing: Prepares what is sent.
        push_timeout_s: Deadline of one attempt, in seconds.
        reconcile: Asks all live replicas for their state.
        check_not_fenced: Raises FencedError once a newer incarnation has taken over.
    """

    def __init__(
        self,
        *,
        run_id: str,
        incarnation: int,
        epochs: CommunicatorEpochs,
        outgoing: Outgoing,
        push_timeout_s: float,
        reconcile: Reconcile,
        check_not_fenced: Callable[[], Awaitable[None]],
    ) -> None:
        self._run_id = run_id
        self._incarnation = incarnation
        self._epochs = epochs
        self._outgoing = outgoing
        self._push_timeout_s = push_timeout_s
        self._reconcile = reconcile
        self._check_not_fenced = check_not_fenced

    async def make(
        self,
        result: PushResult,
        weights: Weights,
        announced: Announcement,
        probing: StartedProbe | None,
        *,
        deadline: float,
    ) -> None:
        """Make at most two attempts, until one reaches its commits. ``result`` receives the results.

        Args:
            result: The push: its replicas and its results.
            weights: Returns all parameters.
            announced: Their names, dtypes and shapes.
            probing: The probe of these weights; None: nothing is probed.
            deadline: Monotonic deadline of the first attempt. The second attempt has ``push_timeout_s``.

        Raises:
            FencedError: A newer incarnation of the trainer has taken over.
            StateLostError: Redis has forgotten this incarnation.
            PushError: The weights differ from the announcement, or have diverged.
            UnavailableError: The trainer is stuck.
        """
        for number in range(1, _NUM_ATTEMPTS + 1):
            try:
                await self._attempt(result, weights, announced, probing, deadline=deadline)
            except AttemptError as error:
                log.warning(
                    "pushing version %d in epoch %d failed: %s", result.policy_version, self._epochs.current, error
                )
                await self._leave_out(result, error.blamed, aborted=result.lacking(), reason=str(error))
                await self._outgoing.remove_old(deadline=deadline)
                if number == _NUM_ATTEMPTS:
                    result.failed = dict.fromkeys(result.lacking(), str(error)) | result.failed
                    return
            except HeadraceError as error:  # fenced off, or our own weights are wrong: release the members
                await self._give_up(result.lacking(), str(error))
                raise
            else:
                return
            result.go_on_with(await self._reconcile(without=result.failed))
            if not result.fleet.ready:
                return
            deadline = time.monotonic() + self._push_timeout_s

    async def _attempt(
        self,
        result: PushResult,
        weights: Weights,
        announced: Announcement,
        probing: StartedProbe | None,
        *,
        deadline: float,
    ) -> None:
        """Run one attempt up to the commits. ``result`` records the commits that fail.

        Raises:
            AttemptError: A step before the commits failed.
            FencedError: A newer incarnation has taken over.
        """
        ready, transport = result.fleet.ready, result.transport
        is_asleep = any(member.info.is_asleep for member in ready.values())
        if probing is not None and (is_asleep or self._outgoing.is_compared(transport)):
            await probing.result()
        if is_asleep:
            # torch keeps memory that the optimizer no longer uses; the engine needs it when it wakes.
            torch.cuda.empty_cache()
        parcel = await self._outgoing.prepare(
            weights,
            announced,
            policy_version=result.policy_version,
            transport=transport,
            staged=[member.info.staged_checksum for member in ready.values()],
            deadline=deadline,
        )
        is_on_disk = transport == "disk"
        result.holding = [
            name for name, member in ready.items() if is_on_disk and self._is_held_by(member.info, parcel)
        ]
        if is_on_disk:
            parcel = await self._outgoing.write(parcel, deadline=deadline)
        result.num_bytes = parcel.num_bytes
        communicator, newcomers = self._epochs.enter(result.fleet)
        attempt = partial(
            PushAttempt,
            requirements=result.fleet.requirements,
            communicator_epoch=self._epochs.current,
            communicator=communicator,
            buffer_bytes=self._epochs.chunk_bytes(transport),
            deadline=deadline,
        )
        if newcomers:
            await attempt(members=newcomers).join(address=self._epochs.bind_address, weight_dir=self._outgoing.run_dir)
        receiving = attempt(members=result.lacking())
        if receiving.members:
            result.begun_checksum = parcel.checksum
            await receiving.begin(parcel)
            # On a GPU, a broadcast without receivers would block other work on that device.
            if probing is not None and not (transport == "gloo" and probing.may_go_on):
                await probing.result()
            checksum = await receiving.broadcast(parcel) if communicator.is_streamed else parcel.checksum
            probe = None if probing is None else await probing.result()
            # These weights must not replace a newer trainer's.
            await self._check_not_fenced()
            result.replies, failed = await receiving.commit(
                policy_version=result.policy_version, checksum=checksum, probe=probe
            )
            if failed:
                log.warning(
                    "%d of %d generators failed to commit: %s", len(failed), len(ready), ", ".join(sorted(failed))
                )
                members = {name: ready[name] for name in failed}
                await self._leave_out(result, failed, aborted=members, reason="the commit failed")
        await self._outgoing.remove_old(deadline=deadline)

    async def _leave_out(
        self, result: PushResult, failed: dict[str, str], *, aborted: dict[str, Member], reason: str
    ) -> None:
        """Abort these members and record the failures. The next attempt, or a later push, opens a new epoch."""
        result.failed |= failed
        result.blamed |= failed.keys()
        for info in await self._give_up(aborted, reason):
            # A replica that replied, or has staged these weights, could read the files: they are good, and stay.
            is_read = result.begun_checksum is None or info.staged_checksum == result.begun_checksum
            if info.replica_id in failed and info.replica_id not in result.replies and not is_read:
                self._outgoing.distrust()

    async def _give_up(self, members: dict[str, Member], reason: str) -> Iterable[ReplicaInfo]:
        """Abort these members and return the state of every member that answers."""
        self._epochs.close()
        if not self._epochs.current:
            return ()  # no replica knows of this push yet
        body = AbortRequest(run_id=self._run_id, epoch=self._epochs.current, reason=reason[:500])

        async def abort(replica: Replica) -> ReplicaInfo | None:
            try:
                return await replica.abort(body, timeout_s=_ABORT_TIMEOUT_S)
            except HeadraceError as error:
                log.info("abort was not confirmed: %s", error)
                return None

        answers = await asyncio.gather(*(abort(member.replica) for member in members.values()))
        return [info for info in answers if info is not None]

    def _is_held_by(self, info: ReplicaInfo, parcel: Parcel) -> bool:
        """Return whether a replica already serves exactly these weights, pushed by this incarnation."""
        is_ours = (info.incarnation, info.policy_version) == (self._incarnation, parcel.policy_version)
        return is_ours and not info.is_held and parcel.checksum is not None and info.staged_checksum == parcel.checksum
