"""Opens communicators between trainer and generators, numbers them as epochs, and takes pushes through their steps.

    same members, same transport                  --> keep the open communicator
    anything else                                 --> close it and open a new one
    disk or simulated, a late replica             --> it joins the open communicator

weight_sender.py draws the steps. Members are called concurrently. If a join, a begin or the broadcast fails, or is
still under way shortly before the deadline, the communicator is closed, and blame.py finds the replicas that caused it.
Commits are independent: a member that holds the new version keeps it, even if others fail.

Epochs are numbered within an incarnation, and each number begins with the incarnation (lineage.py), so they rise across
incarnations too.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from services.trainer.push.blame import LEAVE_S, OURSELVES, AttemptError, all_answer, all_stay, time_for_members
from services.trainer.push.communicator import Communicator
from services.trainer.push.membership import Abilities, rank_offsets
from services.trainer.push.packing import Parcel, SentDigests, pack
from services.trainer.push.push_settings import PushSettings
from services.trainer.push.replicas import Fleet, Member, Replica
from services.trainer.push.transports import chunk_bytes, open_communicator
from shared.control import (
    AbortRequest,
    BeginRequest,
    CommitReply,
    CommitRequest,
    JoinRequest,
    Probe,
    ReplicaInfo,
    SleepRequest,
    Transport,
)
from shared.errors import HeadraceError, PushError
from shared.lineage import epoch_of
from shared.service.daemon_thread import in_thread

log = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 5.0
_ResultT = TypeVar("_ResultT")


class CommunicatorEpochs:
    """Holds the open communicator, if there is one, and takes its members through the steps of a push.

    ``join``, ``begin`` and ``broadcast`` raise AttemptError if a member fails or the deadline (monotonic) passes.
    ``commit`` raises it only if the deadline has passed before.

    Args:
        own: Versions of the trainer, sent in the join request.

    Attributes:
        current: Number of the newest epoch; 0 before the first.
        transport: Transport of the newest epoch; None before the first.
    """

    def __init__(self, settings: PushSettings, own: Abilities) -> None:
        self.current = 0
        self.transport: Transport | None = None
        self._settings = settings
        self._own = own
        self._buffer_bytes = 0
        self._num_epochs = 0
        self._communicator: Communicator | None = None
        self._members: set[str] = set()

    def enter(self, fleet: Fleet) -> dict[str, Member]:
        """Keep the communicator or open a new one, and return the replicas that have to join it, which may be none.

        Over gloo, ipc and NCCL, the members of a communicator are fixed, so a new member needs a new epoch. With the
        other transports, a late replica joins the current epoch and the other members stay.

        Raises:
            AttemptError: A new communicator cannot be opened now.
        """
        outside = {name: member for name, member in fleet.ready.items() if member.info.epoch != self.current}
        communicator = self._communicator if self.transport == fleet.transport else None
        if communicator is not None and not communicator.is_streamed:
            # A replica that has left this epoch would refuse to join it again.
            if not outside.keys() & self._members:
                self._members |= outside.keys()
                return outside
        elif communicator is not None and not outside and set(fleet.ready) == self._members:
            return {}
        self.close()
        self._num_epochs += 1
        self.current = epoch_of(self._settings.incarnation, self._num_epochs)
        self.transport = fleet.transport
        self._buffer_bytes = self._settings.buffer_bytes or chunk_bytes(fleet.transport)
        try:
            self._communicator = open_communicator(
                fleet.transport, address=self._settings.bind_address, buffer_bytes=self._buffer_bytes
            )
        except PushError as error:
            raise AttemptError(str(error), blamed={}) from error
        self._members = set(fleet.ready)
        return fleet.ready

    async def join(self, newcomers: Mapping[str, Member], *, weight_dir: str | None, deadline: float) -> None:
        """Have the workers of these replicas enter the communicator, while this process enters it as rank 0.

        ``weight_dir`` is the directory of the run's versions for disk; other transports do not use it.
        """
        communicator = self._opened()
        deadline = min(deadline, time.monotonic() + self._settings.push_timeout_s)
        offsets, world_size = rank_offsets({name: member.info.num_workers for name, member in newcomers.items()})
        timeout_s = _time_for_members(deadline)

        def body(replica_id: str) -> JoinRequest:
            assert self.transport is not None
            return JoinRequest(
                run_id=self._settings.run_id,
                epoch=self.current,
                transport=self.transport,
                master_address=self._settings.bind_address,
                master_port=communicator.port,
                rank_offset=offsets[replica_id],
                world_size=world_size,
                torch_version=self._own.torch_version,
                nccl_version=self._own.nccl_version,
                buffer_bytes=self._buffer_bytes,
                timeout_s=timeout_s,
                nccl_unique_id=communicator.nccl_unique_id,
                trainer_device_uuid=self._own.device_uuid,
                ipc_buffer=communicator.export(),
                weight_dir=weight_dir,
            )

        rendezvous = partial(communicator.rendezvous, world_size=world_size, timeout_s=timeout_s)
        calls: dict[str, Coroutine[Any, Any, Any]] = {
            name: member.replica.join(body(name), timeout_s=_left(deadline) + LEAVE_S)
            for name, member in newcomers.items()
        }
        calls[OURSELVES] = _off_loop(rendezvous, "rendezvous", deadline=deadline)
        await all_answer("join", calls, deadline=deadline, close=communicator.close)

    async def begin(self, members: Mapping[str, Member], parcel: Parcel, *, deadline: float) -> None:
        """Send the members the names, dtypes and shapes to expect, and have them start to receive."""
        body = BeginRequest(
            run_id=self._settings.run_id,
            epoch=self.current,
            policy_version=parcel.policy_version,
            names=[spec.name for spec in parcel.announced],
            dtype_names=[spec.dtype_name for spec in parcel.announced],
            shapes=[list(spec.shape) for spec in parcel.announced],
            timeout_s=_time_for_members(deadline),
            encoding=parcel.encoding,
            sizes=None if parcel.sizes is None else list(parcel.sizes),
            base_checksum=parcel.base_checksum,
            place=parcel.place,
        )
        left = _left(deadline) + LEAVE_S
        calls = {name: member.replica.begin(body, timeout_s=left) for name, member in members.items()}
        await all_answer("begin", calls, deadline=deadline, close=self._opened().close)

    async def broadcast(self, members: Mapping[str, Member], parcel: Parcel, *, deadline: float) -> str | None:
        """Send the parcel in chunks, and return the checksum of the full weights. For disk and simulated, send nothing.

        The checksum is None with simulated generators.
        """
        communicator = self._opened()
        if not communicator.is_streamed:
            return parcel.checksum
        digests = SentDigests()
        attempted = CommitRequest(
            run_id=self._settings.run_id, epoch=self.current, policy_version=parcel.policy_version, timeout_s=LEAVE_S
        )

        def send() -> str:
            weights = parcel.tensors()
            sent = weights if parcel.checksum is not None else digests.watching(weights)
            for chunk in pack(sent, parcel.travelling, buffer_bytes=self._buffer_bytes):
                communicator.broadcast(chunk, timeout_s=min(self._settings.push_timeout_s, _left(deadline)))
            communicator.finish()
            return digests.checksum() if parcel.checksum is None else parcel.checksum

        sending = _off_loop(send, "broadcast", deadline=deadline)
        return await all_stay(sending, members, attempted, deadline=deadline, close=communicator.close)

    async def commit(
        self,
        members: Mapping[str, Member],
        *,
        policy_version: int,
        checksum: str | None,
        probe: Probe | None,
        deadline: float,
    ) -> tuple[dict[str, CommitReply], dict[str, str]]:
        """Have the members load the received weights. Return their replies and the reasons of failures, by replica id.

        A member whose reply shows a wrong version or a failed probe is in both.
        """
        body = CommitRequest(
            run_id=self._settings.run_id,
            epoch=self.current,
            policy_version=policy_version,
            timeout_s=_time_for_members(deadline),
            checksum=checksum,
            probe=probe,
        )
        left = _left(deadline)
        answers = await _ask_all(members.values(), lambda replica: replica.commit(body, timeout_s=left))
        replies: dict[str, CommitReply] = {}
        failed: dict[str, str] = {}
        for name, answer in zip(members, answers, strict=True):
            if isinstance(answer, HeadraceError):
                failed[name] = f"commit: {answer}"
                continue
            replies[name] = answer
            if answer.policy_version != policy_version:
                failed[name] = f"it read back policy version {answer.policy_version} after {policy_version} was pushed"
            elif answer.probe_failure is not None:
                failed[name] = f"after the push {answer.probe_failure}"
        return replies, failed

    async def abort(self, members: Iterable[Member], *, reason: str) -> list[ReplicaInfo]:
        """Close the communicator, have these members discard the push, and return the state of each that answers."""
        self.close()
        if not self.current:
            return []  # no replica knows of this push yet
        body = AbortRequest(run_id=self._settings.run_id, epoch=self.current, reason=reason[:500])
        answers = await _ask_all(members, lambda replica: replica.abort(body, timeout_s=_ABORT_TIMEOUT_S))
        for answer in answers:
            if isinstance(answer, HeadraceError):
                log.info("abort was not confirmed: %s", answer)
        return [answer for answer in answers if isinstance(answer, ReplicaInfo)]

    async def let_sleep(self, members: Iterable[Member], *, timeout_s: float) -> None:
        """Have the members of the current epoch release their GPU memory until the next begin. Failures are logged."""
        body = SleepRequest(run_id=self._settings.run_id, epoch=self.current)
        inside = [member for member in members if member.info.epoch == self.current]
        for answer in await _ask_all(inside, lambda replica: replica.sleep(body, timeout_s=timeout_s)):
            if isinstance(answer, HeadraceError):
                log.warning("a generator did not release its GPU memory: %s", answer)

    def close(self) -> None:
        """Close the communicator, which wakes every thread blocked in it. The next push opens a new one."""
        if self._communicator is not None:
            self._communicator.close()
        self._communicator = None
        self._members = set()

    def _opened(self) -> Communicator:
        if self._communicator is None:
            raise AttemptError("the communicator is closed", blamed={})
        return self._communicator


async def _ask_all(
    members: Iterable[Member], ask: Callable[[Replica], Coroutine[Any, Any, _ResultT]]
) -> list[_ResultT | HeadraceError]:
    """Ask all members concurrently, and return each answer, or the HeadraceError in its place, in their order."""

    async def one(member: Member) -> _ResultT | HeadraceError:
        try:
            return await ask(member.replica)
        except HeadraceError as error:
            return error

    return await asyncio.gather(*(one(member) for member in members))


async def _off_loop(work: Callable[[], _ResultT], name: str, *, deadline: float) -> _ResultT:
    try:
        # The work observes the deadline itself; this second timeout is for work that hangs.
        return await in_thread(work, timeout_s=_left(deadline) + LEAVE_S, name=name)
    except TimeoutError as error:
        raise PushError(f"{name} did not end by its deadline") from error


def _left(deadline: float) -> float:
    return deadline - time.monotonic()


def _time_for_members(deadline: float) -> float:
    if _left(deadline) <= 0:
        raise AttemptError("the deadline of the push has passed", blamed={})
    return time_for_members(_left(deadline))
