"""One attempt to bring a set of weights to the members of one communicator epoch, under one deadline.

    join all + own rendezvous --> begin all --> broadcast --> commit all

Members are called concurrently. If a join or a begin fails, or has not ended shortly before the deadline, the
communicator is closed. That wakes every member blocked in it, and the members get a moment to answer. The moment is
needed because their own deadlines began when the body reached them, and gloo's deadline starts anew with each peer that
arrives.

The replicas to blame are chosen in this order: a replica that was unreachable before the close; a replica that stays
silent after it (of several: roll_call.py); the replicas that reported an error before it. Commits are independent: a
member that holds the new version keeps it, even if others fail.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from services.trainer.deadline_thread import in_thread
from services.trainer.push.communicator import Communicator
from services.trainer.push.membership import Requirements, rank_offsets
from services.trainer.push.packing import Parcel, SentDigests, pack
from services.trainer.push.replicas import Member
from services.trainer.push.roll_call import until_one_is_silent, who_left
from shared.control import BeginRequest, CommitReply, CommitRequest, JoinRequest, Probe
from shared.errors import HeadraceError, PushError, UnavailableError

SETTLE_S = 3.0
"""How long to wait after a failed step, so that every member has left the communicator and reported its error."""
_WATCH_EVERY_S = 1.0
_ANSWER_S = 1.0
"""Members get this much less time than we wait for them, so that their own error messages arrive."""
_OURSELVES = ""
_ResultT = TypeVar("_ResultT")


class AttemptError(PushError):
    """An attempt failed.

    Args:
        message: What happened.
        blamed: Replica to reason: the replicas that the next attempt leaves out. Empty if no replica stands out.
    """

    def __init__(self, message: str, *, blamed: dict[str, str]) -> None:
        super().__init__(message)
        self.blamed = blamed


@dataclass(frozen=True)
class PushAttempt:
    """One attempt. Each step before the commits raises AttemptError when a member fails or the deadline passes.

    Attributes:
        requirements: Run, transport and versions.
        epoch: Number of the communicator epoch.
        communicator: The trainer's end of that epoch.
        members: The replicas that take part, in rank order.
        buffer_bytes: Size after which a packed chunk is cut.
        deadline: Monotonic time at which the attempt has succeeded or failed.
    """

    requirements: Requirements
    epoch: int
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
                epoch=self.epoch,
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
        calls[_OURSELVES] = self._off_loop(rendezvous, "rendezvous")
        await self._everyone("join", calls)

    async def begin(self, parcel: Parcel) -> None:
        """Have every member check the announcement and start to receive."""
        body = BeginRequest(
            run_id=self.requirements.run_id,
            epoch=self.epoch,
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
        await self._everyone(
            "begin", {name: member.replica.begin(body, timeout_s=left) for name, member in self.members.items()}
        )

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
            failure = _error_of(sending)
            if failure is None:
                return sending.result()
            is_late = self._is_late()
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
            epoch=self.epoch,
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
            run_id=self.requirements.run_id, epoch=self.epoch, policy_version=policy_version, timeout_s=SETTLE_S
        )
        return await who_left(self.members, attempted, settle_s=SETTLE_S, patient_until=self._late_at())

    async def _off_loop(self, work: Callable[[], _ResultT], name: str) -> _ResultT:
        try:
            # The work observes the deadline itself; this second timeout is for work that hangs.
            return await in_thread(work, timeout_s=self._time_left() + SETTLE_S, name=name)
        except TimeoutError as error:
            raise PushError(f"{name} did not end by its deadline") from error

    async def _everyone(self, step: str, calls: Mapping[str, Coroutine[Any, Any, Any]]) -> dict[str, Any]:
        """Run all calls concurrently and return all answers.

        Raises:
            AttemptError: A call failed, or the deadline passed.
        """
        tasks = {
            name: asyncio.create_task(call, name=f"push {step} {name or 'ourselves'}") for name, call in calls.items()
        }
        try:
            left = max(_for_members(self._time_left()), 0.0)
            await asyncio.wait(tasks.values(), timeout=left, return_when=asyncio.FIRST_EXCEPTION)
            if all(task.done() and _error_of(task) is None for task in tasks.values()):
                return {name: task.result() for name, task in tasks.items()}
            failing = {name for name, task in tasks.items() if name and task.done() and _error_of(task) is not None}
            early = set[str]() if self._is_late() else failing
            self.communicator.close()
            await asyncio.wait(tasks.values(), timeout=SETTLE_S)
            if all(_answered(tasks[name]) for name in early):
                members = {name: task for name, task in tasks.items() if name}
                await until_one_is_silent(members, settle_s=SETTLE_S, patient_until=self._late_at())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        errors = {name: f"{step}: {error}" for name, task in tasks.items() if (error := _error_of(task)) is not None}
        unanswered = {name: reason for name, reason in errors.items() if name and not _answered(tasks[name])}
        gone = {name: reason for name, reason in unanswered.items() if name in early}
        # The surviving members of a wire may need longer than this to notice that a peer died.
        blamed = gone or unanswered or {name: reason for name, reason in errors.items() if name in early}
        reason = next(iter((blamed or errors).values()), f"{step} did not end by the deadline")
        raise AttemptError(reason, blamed=blamed)

    def _time_left(self) -> float:
        return self.deadline - time.monotonic()

    def _is_late(self) -> bool:
        """Return whether the deadline has come.

        All members give up then because one did not come, and innocent ones give up first. So no replica is blamed.
        """
        return time.monotonic() >= self._late_at()

    def _late_at(self) -> float:
        return self.deadline - 1.5 * _ANSWER_S

    def _time_for_members(self) -> float:
        left = self._time_left()
        if left <= 0:
            raise AttemptError("the deadline of the push has passed", blamed={})
        return _for_members(left)


def _for_members(left: float) -> float:
    """Return the part of the remaining time that members get, in seconds."""
    return max(left - _ANSWER_S, left / 2)


def _error_of(task: asyncio.Task[Any]) -> BaseException | str | None:
    """Return why a task has no result. Re-raises any exception that is not a HeadraceError, because it is a bug."""
    if not task.done():
        return "no answer"
    if task.cancelled():
        return "no answer by the deadline"
    error = task.exception()
    if error is not None and not isinstance(error, HeadraceError):
        raise error
    return error


def _answered(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and not isinstance(task.exception(), UnavailableError)
