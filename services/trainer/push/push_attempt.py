"""One attempt to bring a set of weights to the members of one communicator epoch, under one deadline.

    join all + own rendezvous --> begin all --> broadcast --> commit all

Members are called concurrently. If a join, a begin or the broadcast fails, or has not ended shortly before the
deadline, the communicator is closed, and blame.py finds the replicas that caused it. Commits are independent: a member
that holds the new version keeps it, even if others fail.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from services.trainer.deadline_thread import in_thread
from services.trainer.push.blame import (
    OURSELVES,
    SETTLE_S,
    AttemptError,
    all_answer,
    error_of,
    late_at,
    time_for_members,
    who_left,
)
from services.trainer.push.communicator import Communicator
from services.trainer.push.membership import Requirements, rank_offsets
from services.trainer.push.packing import Parcel, SentDigests, pack
from services.trainer.push.replicas import Member
from shared.control import BeginRequest, CommitReply, CommitRequest, JoinRequest, Probe
from shared.errors import HeadraceError, PushError

_WATCH_EVERY_S = 1.0
_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True)
class PushAttempt:
    """One attempt. Each step before the commits raises AttemptError when a member fails or the deadline passes.

    Attributes:
        requirements: Run, transport and versions.
        communicator_epoch: Number of the epoch that the members join, or are in.
        communicator: The trainer's end of that epoch.
        members: The replicas that take part, in rank order.
        buffer_bytes: Size after which a packed chunk is cut.
        deadline: Monotonic time at which the attempt has succeeded or failed.
    """

    requirements: Requirements
    communicator_epoch: int
    communicator: Communicator
    members: Mapping[str, Member]
    buffer_bytes: int
    deadline: float

    async def join(self, *, address: str, weight_dir: str | None) -> None:
        """Form the communicator: every member's workers and the trainer enter it.

        Args:
            address: The trainer's address for the members.
            weight_dir: For disk: the directory of the run's versions.
        """
        offsets, world_size = rank_offsets({name: member.info.num_workers for name, member in self.members.items()})
        timeout_s = self._time_for_members()

        def body(replica_id: str) -> JoinRequest:
            return JoinRequest(
                run_id=self.requirements.run_id,
                epoch=self.communicator_epoch,
                transport=self.requirements.transport,
                master_address=address,
                master_port=self.communicator.port,
                rank_offset=offsets[replica_id],
                world_size=world_size,
                torch_version=self.requirements.torch_version,
                nccl_version=self.requirements.nccl_version,
                buffer_bytes=self.buffer_bytes,
                timeout_s=timeout_s,
                nccl_unique_id=self.communicator.nccl_unique_id,
                ipc_buffer=self.communicator.export(),
                weight_dir=weight_dir,
            )

        def rendezvous() -> None:
            self.communicator.rendezvous(world_size=world_size, timeout_s=timeout_s)

        calls: dict[str, Coroutine[Any, Any, Any]] = {
            name: member.replica.join(body(name), timeout_s=self._time_left() + SETTLE_S)
            for name, member in self.members.items()
        }
        calls[OURSELVES] = self._off_loop(rendezvous, "rendezvous")
        await all_answer("join", calls, deadline=self.deadline, close=self.communicator.close)

    async def begin(self, parcel: Parcel) -> None:
        """Have every member check the announcement and start to receive."""
        body = BeginRequest(
            run_id=self.requirements.run_id,
            epoch=self.communicator_epoch,
            policy_version=parcel.policy_version,
            names=list(parcel.announced.names),
            dtype_names=parcel.announced.dtype_names,
            shapes=[list(shape) for shape in parcel.announced.shapes],
            timeout_s=self._time_for_members(),
            encoding=parcel.encoding,
            sizes=None if parcel.sizes is None else list(parcel.sizes),
            base_checksum=parcel.base_checksum,
            place=parcel.place,
        )
        left = self._time_left() + SETTLE_S
        calls = {name: member.replica.begin(body, timeout_s=left) for name, member in self.members.items()}
        await all_answer("begin", calls, deadline=self.deadline, close=self.communicator.close)

    async def broadcast(self, parcel: Parcel) -> str:
        """Send everything, and return its checksum.

        A member that fails leaves the communicator. It is found by asking all members whether they are still in it.
        """
        digests = SentDigests()

        def send() -> str:
            weights = parcel.tensors()
            sent = weights if parcel.checksum is not None else digests.watching(weights)
            for chunk in pack(sent, parcel.travelling, buffer_bytes=self.buffer_bytes):
                self.communicator.broadcast(chunk, timeout_s=self._time_left())
            self.communicator.finish(timeout_s=self._time_left())
            return digests.checksum() if parcel.checksum is None else parcel.checksum

        sending = asyncio.create_task(self._off_loop(send, "broadcast"), name="push broadcast")
        watching = asyncio.create_task(self._until_one_left(parcel.policy_version), name="push watch members")
        try:
            await asyncio.wait(
                {sending, watching}, timeout=max(self._time_left(), 0.0), return_when=asyncio.FIRST_COMPLETED
            )
            failure = error_of(sending)
            if failure is None:
                return sending.result()
            is_late = time.monotonic() >= late_at(self.deadline)
            left = watching.result() if watching.done() else await self._who_left(parcel.policy_version)
            blamed = {} if is_late else left
            self.communicator.close()
            raise AttemptError(f"broadcast: {next(iter(blamed.values()), failure)}", blamed=blamed)
        finally:
            sending.cancel()
            watching.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)

    async def commit(
        self, *, policy_version: int, checksum: str | None, probe: Probe | None
    ) -> tuple[dict[str, CommitReply], dict[str, str]]:
        """Have every member load what it received. Return the replies, and the reason of each failure.

        A member whose reply shows a wrong version or a failed probe appears in both.
        """
        body = CommitRequest(
            run_id=self.requirements.run_id,
            epoch=self.communicator_epoch,
            policy_version=policy_version,
            timeout_s=self._time_for_members(),
            checksum=checksum,
            probe=probe,
        )
        left = self._time_left()

        async def one(member: Member) -> CommitReply | HeadraceError:
            try:
                return await member.replica.commit(body, timeout_s=left)
            except HeadraceError as error:
                return error

        answers = await asyncio.gather(*(one(member) for member in self.members.values()))
        replies: dict[str, CommitReply] = {}
        failed: dict[str, str] = {}
        for name, answer in zip(self.members, answers, strict=True):
            if not isinstance(answer, CommitReply):
                failed[name] = f"commit: {answer}"
                continue
            replies[name] = answer
            if answer.policy_version != policy_version:
                failed[name] = f"it read back policy version {answer.policy_version} after {policy_version} was pushed"
            elif answer.probe_failure is not None:
                failed[name] = f"after the push {answer.probe_failure}"
        return replies, failed

    async def _until_one_left(self, policy_version: int) -> dict[str, str]:
        """Wait until members have left, and return them with their reasons.

        Without this the send would wait for a stopped process, which keeps its connections.
        """
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            if left := await self._who_left(policy_version):
                return left

    async def _who_left(self, policy_version: int) -> dict[str, str]:
        attempted = CommitRequest(
            run_id=self.requirements.run_id,
            epoch=self.communicator_epoch,
            policy_version=policy_version,
            timeout_s=SETTLE_S,
        )
        return await who_left(self.members, attempted, settle_s=SETTLE_S, patient_until=late_at(self.deadline))

    async def _off_loop(self, work: Callable[[], _ResultT], name: str) -> _ResultT:
        try:
            # The work observes the deadline itself; this second timeout is for work that hangs.
            return await in_thread(work, timeout_s=self._time_left() + SETTLE_S, name=name)
        except TimeoutError as error:
            raise PushError(f"{name} did not end by its deadline") from error

    def _time_left(self) -> float:
        return self.deadline - time.monotonic()

    def _time_for_members(self) -> float:
        left = self._time_left()
        if left <= 0:
            raise AttemptError("the deadline of the push has passed", blamed={})
        return time_for_members(left)
