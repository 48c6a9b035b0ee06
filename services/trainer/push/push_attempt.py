"""One try to bring a set of weights to the members of one communicator epoch, under one deadline.

    join all + own rendezvous --> begin all --> broadcast --> commit all

Calls to members run side by side. When one fails, the communicator is closed, so that whoever is blocked in it comes
back, and the others get a moment to answer: who stays silent then is to blame, not who says it broke.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from services.trainer.push.communicator import Communicator
from services.trainer.push.deadline_thread import in_thread
from services.trainer.push.fleet import Requirements, rank_offsets
from services.trainer.push.packing import Announcement, Weights, pack
from services.trainer.push.replicas import Member
from shared.control import BeginRequest, CommitReply, CommitRequest, JoinRequest
from shared.errors import HeadraceError, PushError, UnavailableError

_SETTLE_S = 3.0
_WATCH_EVERY_S = 1.0
_ANSWER_S = 1.0
"""Members get this much less time than we wait for them, so that their own account of a failure arrives."""
_OURSELVES = ""


class AttemptError(PushError):
    """An attempt failed.

    Args:
        message: What happened.
        blamed: Replica to reason: those the next attempt does without. Empty if nobody stands out.
    """

    def __init__(self, message: str, *, blamed: dict[str, str]) -> None:
        super().__init__(message)
        self.blamed = blamed


@dataclass(frozen=True)
class PushAttempt:
    """One attempt. Each of its steps raises AttemptError when a member fails or the deadline passes.

    Attributes:
        requirements: Run, transport and versions.
        epoch: Number of the communicator epoch.
        communicator: Ours, of that epoch.
        members: Who takes part; rank order.
        buffer_bytes: Size after which a packed chunk is cut.
        deadline: Monotonic time at which everything has ended, one way or the other.
    """

    requirements: Requirements
    epoch: int
    communicator: Communicator
    members: Mapping[str, Member]
    buffer_bytes: int
    deadline: float

    async def join(self, *, address: str) -> None:
        """Form the communicator: every member's workers enter it, and so do we."""
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
            )

        def rendezvous() -> None:
            self.communicator.rendezvous(world_size=world_size, timeout_s=timeout_s)

        calls: dict[str, Coroutine[Any, Any, Any]] = {
            name: member.replica.join(body(name), timeout_s=self._time_left()) for name, member in self.members.items()
        }
        calls[_OURSELVES] = self._off_loop(rendezvous, "rendezvous")
        await self._everyone("join", calls)

    async def begin(self, announced: Announcement, *, policy_version: int) -> None:
        """Have every member hold decoding and start to receive."""
        body = BeginRequest(
            run_id=self.requirements.run_id,
            epoch=self.epoch,
            policy_version=policy_version,
            names=list(announced.names),
            dtype_names=announced.dtype_names,
            shapes=[list(shape) for shape in announced.shapes],
            timeout_s=self._time_for_members(),
        )
        left = self._time_left()
        await self._everyone(
            "begin", {name: member.replica.begin(body, timeout_s=left) for name, member in self.members.items()}
        )

    async def broadcast(self, weights: Weights, announced: Announcement, *, policy_version: int) -> None:
        """Send all weights. A member that fails leaves the communicator, and is found by asking who is still in it."""

        def send() -> None:
            for chunk in pack(weights(), announced, buffer_bytes=self.buffer_bytes):
                self.communicator.broadcast(chunk, timeout_s=self._time_left())

        sending = asyncio.create_task(self._off_loop(send, "broadcast"), name="push broadcast")
        watching = asyncio.create_task(self._until_one_left(policy_version), name="push watch members")
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            failure = _error_of(sending)
            if failure is None:
                return
            is_late = self._is_late()
            left = watching.result() if watching.done() else await self._who_left(policy_version)
            blamed = {} if is_late else left
            self.communicator.close()
            raise AttemptError(f"broadcast: {next(iter(blamed.values()), failure)}", blamed=blamed)
        finally:
            sending.cancel()
            watching.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)

    async def commit(self, *, policy_version: int) -> dict[str, CommitReply]:
        """Have every member go on decoding, and return what they read back, by replica.

        Raises:
            AttemptError: Also where one holds another version than it was sent.
        """
        body = CommitRequest(run_id=self.requirements.run_id, epoch=self.epoch, policy_version=policy_version)
        left = self._time_left()
        replies: dict[str, CommitReply] = await self._everyone(
            "commit", {name: member.replica.commit(body, timeout_s=left) for name, member in self.members.items()}
        )
        wrong = {
            name: f"it read back policy version {reply.policy_version} after {policy_version} was pushed"
            for name, reply in replies.items()
            if reply.policy_version != policy_version
        }
        if wrong:
            raise AttemptError("a generator holds another version than it was sent", blamed=wrong)
        return replies

    async def _until_one_left(self, policy_version: int) -> dict[str, str]:
        """Return who left, once somebody did: a stopped process keeps its connections, and we would wait for it."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            if left := await self._who_left(policy_version):
                return left

    async def _who_left(self, policy_version: int) -> dict[str, str]:
        body = CommitRequest(run_id=self.requirements.run_id, epoch=self.epoch, policy_version=policy_version)

        async def why(member: Member) -> str | None:
            try:
                if (await member.replica.info(timeout_s=_SETTLE_S)).epoch == self.epoch:
                    return None
                # Nothing is left to commit there; the refusal says what happened.
                await member.replica.commit(body, timeout_s=_SETTLE_S)
            except HeadraceError as error:
                return str(error)
            return "it left in the middle of the transfer"

        reasons = await asyncio.gather(*(why(member) for member in self.members.values()))
        return {name: reason for name, reason in zip(self.members, reasons, strict=True) if reason is not None}

    async def _off_loop(self, work: Callable[[], None], name: str) -> None:
        try:
            # The work keeps the deadline itself; this second one is for the case that it cannot.
            await in_thread(work, timeout_s=self._time_left() + _SETTLE_S, name=name)
        except TimeoutError as error:
            raise PushError(f"{name} did not end by its deadline") from error

    async def _everyone(self, step: str, calls: Mapping[str, Coroutine[Any, Any, Any]]) -> dict[str, Any]:
        """Run all calls at once and return all answers.

        Raises:
            AttemptError: One failed, or the deadline passed.
        """
        tasks = {
            name: asyncio.create_task(call, name=f"push {step} {name or 'ourselves'}") for name, call in calls.items()
        }
        try:
            left = max(self._time_left(), 0.0)
            await asyncio.wait(tasks.values(), timeout=left, return_when=asyncio.FIRST_EXCEPTION)
            if all(task.done() and _error_of(task) is None for task in tasks.values()):
                return {name: task.result() for name, task in tasks.items()}
            failing = {name for name, task in tasks.items() if name and task.done() and _error_of(task) is not None}
            early = set[str]() if self._is_late() else failing
            self.communicator.close()
            await asyncio.wait(tasks.values(), timeout=_SETTLE_S)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        errors = {name: f"{step}: {error}" for name, task in tasks.items() if (error := _error_of(task)) is not None}
        silent = {name: reason for name, reason in errors.items() if name and not _answered(tasks[name])}
        blamed = silent or {name: reason for name, reason in errors.items() if name in early}
        reason = next(iter((blamed or errors).values()), f"{step} did not end by the deadline")
        raise AttemptError(reason, blamed=blamed)

    def _time_left(self) -> float:
        return self.deadline - time.monotonic()

    def _is_late(self) -> bool:
        """At the deadline everybody gives up because somebody did not come, the innocent first; nobody is blamed."""
        return self._time_left() <= 1.5 * _ANSWER_S

    def _time_for_members(self) -> float:
        left = self._time_left()
        if left <= 0:
            raise AttemptError("the deadline of the push has passed", blamed={})
        return max(left - _ANSWER_S, left / 2)


def _error_of(task: asyncio.Task[Any]) -> BaseException | str | None:
    """Return why a task has no result. Anything but our own errors is a bug, and raised."""
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
