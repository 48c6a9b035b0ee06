"""Waits for the members of a push (its replicas) in each step, and finds those that are to blame when a step fails.

    join, begin      all are called --one fails, or time is up--> communicator closed --LEAVE_S--> replicas to blame
    broadcast        all are asked, every second and after a failure, whether they are still in the epoch:
                         a member has left (it says so, or cannot be reached): it is to blame
                         one member is silent: it is to blame
                         several are silent: wait as long again, or until only one is; the silent ones are to blame

Closing the communicator wakes every member blocked in it, and the members get a moment to answer. The moment is needed
because their own deadlines began when the request reached them, and gloo's deadline starts anew with each peer that
arrives. The replicas to blame for a join or a begin are chosen in this order: a replica that was unreachable before the
close; a replica that stays silent after it; the replicas that reported an error before it.

A stopped process keeps its connections, so for a while it looks like a process on an overloaded machine.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from services.trainer.push.replicas import Member
from shared.control import CommitRequest
from shared.errors import HeadraceError, PushError, UnavailableError

LEAVE_S = 3.0
"""How long to wait after a failed step, so that every member has left the communicator and reported its error."""
_ANSWER_S = 1.0
"""Members get this much less time than we wait for them."""
_WATCH_EVERY_S = 1.0
OURSELVES = ""
"""Stands among the members of a step for the trainer's own part in it."""
_ResultT = TypeVar("_ResultT")


class AttemptError(PushError):
    """One attempt of a push failed before any replica committed it. The sender retries once without ``blamed``.

    Attributes:
        blamed: Replica to reason: the replicas that the next attempt leaves out. Empty if no replica stands out.
        in_rendezvous: Whether it failed while the replicas entered the communicator.
    """

    def __init__(self, message: str, *, blamed: dict[str, str], in_rendezvous: bool = False) -> None:
        super().__init__(message)
        self.blamed = blamed
        self.in_rendezvous = in_rendezvous


def time_for_members(left: float) -> float:
    """Return the timeout to give the replicas, in seconds: less than ``left``, so that their errors arrive in time."""
    return max(left - _ANSWER_S, left / 2)


def late_at(deadline: float) -> float:
    """Return the monotonic time, shortly before the deadline, from which a replica that fails is not blamed.

    If one replica does not come, all others time out at about this time, so their errors do not show which one it was.
    """
    return deadline - 1.5 * _ANSWER_S


async def all_answer(
    step: str, calls: Mapping[str, Coroutine[Any, Any, Any]], *, deadline: float, close: Callable[[], None]
) -> None:
    """Make a step's calls to all replicas concurrently. If one fails, close the communicator and find the cause.

    Args:
        step: ``join`` or ``begin``, for messages.
        calls: Replica to the call; OURSELVES for the trainer's own part.
        deadline: Monotonic deadline of the attempt.
        close: Closes the communicator.

    Raises:
        AttemptError: A call failed, or the deadline passed.
    """
    tasks = {name: asyncio.create_task(call, name=f"push {step} {name or 'ourselves'}") for name, call in calls.items()}
    try:
        left = max(time_for_members(deadline - time.monotonic()), 0.0)
        await asyncio.wait(tasks.values(), timeout=left, return_when=asyncio.FIRST_EXCEPTION)
        if all(task.done() and _error_of(task) is None for task in tasks.values()):
            return
        failing = {name for name, task in tasks.items() if name and task.done() and _error_of(task) is not None}
        early = set[str]() if time.monotonic() >= late_at(deadline) else failing
        close()
        await asyncio.wait(tasks.values(), timeout=LEAVE_S)
        if all(_answered(tasks[name]) for name in early):
            members = {name: task for name, task in tasks.items() if name}
            await until_one_is_silent(members, patient_until=late_at(deadline))
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
    raise AttemptError(reason, blamed=blamed, in_rendezvous=step == "join")


async def all_stay(
    sending: Coroutine[Any, Any, _ResultT],
    members: Mapping[str, Member],
    attempted: CommitRequest,
    *,
    deadline: float,
    close: Callable[[], None],
) -> _ResultT:
    """Run the broadcast and return its result. Ask the members every second whether they are still in the epoch.

    Otherwise the broadcast would wait for a stopped process, which keeps its connections.

    Args:
        sending: The broadcast.
        members: The replicas that receive it, by id.
        attempted: A commit request of this epoch, for `who_left`.
        deadline: Monotonic deadline of the attempt.
        close: Closes the communicator.

    Raises:
        AttemptError: The broadcast failed, a member has left, or the deadline passed.
    """

    async def ask() -> dict[str, str]:
        return await who_left(members, attempted, patient_until=late_at(deadline))

    async def watch() -> dict[str, str]:
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            if await ask() and (gone := await ask()):  # a busy member may be silent for a few seconds
                return gone

    sent = asyncio.create_task(sending, name="push broadcast")
    watching = asyncio.create_task(watch(), name="push watch members")
    try:
        left = max(deadline - time.monotonic(), 0.0)
        await asyncio.wait({sent, watching}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        failure = _error_of(sent)
        if failure is None:
            return sent.result()
        is_late = time.monotonic() >= late_at(deadline)
        gone = watching.result() if watching.done() else await ask()
        blamed = {} if is_late else gone
        close()
        raise AttemptError(f"broadcast: {next(iter(blamed.values()), failure)}", blamed=blamed)
    finally:
        sent.cancel()
        watching.cancel()
        await asyncio.gather(sent, watching, return_exceptions=True)


async def who_left(members: Mapping[str, Member], attempted: CommitRequest, *, patient_until: float) -> dict[str, str]:
    """Ask the members whether they are still in the epoch. Return the members that are not, each with a reason.

    They have ``LEAVE_S`` seconds to answer. If none has left, the members that do not answer are returned.

    Args:
        members: The members to ask.
        attempted: A commit request of this epoch. A member that has left refuses it, with the reason why it left.
        patient_until: Monotonic time up to which several silent members are waited for longer.
    """

    async def why(member: Member) -> str | None:
        try:
            if (await member.replica.info(timeout_s=2 * LEAVE_S)).epoch == attempted.epoch:
                return None
            await member.replica.commit(attempted, timeout_s=LEAVE_S)
        except HeadraceError as error:
            return str(error)
        return "it left in the middle of the transfer"

    asked = {name: asyncio.create_task(why(member), name=f"push ask {name}") for name, member in members.items()}
    try:
        await asyncio.wait(asked.values(), timeout=LEAVE_S)
        if not _left(asked):
            await until_one_is_silent(asked, patient_until=patient_until)
        silent = {
            name: f"generator {name} at {members[name].replica.url} does not answer"
            for name, task in asked.items()
            if not task.done()
        }
        return _left(asked) or silent
    finally:
        for task in asked.values():
            task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)


async def until_one_is_silent(tasks: Mapping[str, asyncio.Task[Any]], *, patient_until: float) -> None:
    """Wait until at most one task is unfinished, but no longer than ``LEAVE_S`` seconds or ``patient_until``."""
    until = min(time.monotonic() + LEAVE_S, patient_until)
    while len(silent := [task for task in tasks.values() if not task.done()]) > 1:
        left = until - time.monotonic()
        if left <= 0:
            return
        await asyncio.wait(silent, timeout=left, return_when=asyncio.FIRST_COMPLETED)


def _left(asked: Mapping[str, asyncio.Task[str | None]]) -> dict[str, str]:
    return {name: reason for name, task in asked.items() if task.done() and (reason := task.result()) is not None}


def _error_of(task: asyncio.Task[Any]) -> BaseException | str | None:
    """Return why a task has no result, or None if it has one. Re-raises any exception but a HeadraceError: a bug."""
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
