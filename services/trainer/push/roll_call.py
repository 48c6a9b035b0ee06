"""Asks the members of an epoch whether they are still in it, and tells a stopped process from a slow one.

    all asked --settle_s--> a member has left (it says so, or cannot be reached): it is to blame
                      |---> one member is silent: it is to blame
                      +---> several are silent: they get as long again, until only one is silent

A stopped process keeps its connections, so for a while it looks like a process on an overloaded machine.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from services.trainer.push.replicas import Member
from shared.control import CommitRequest
from shared.errors import HeadraceError


async def who_left(
    members: Mapping[str, Member], attempted: CommitRequest, *, settle_s: float, patient_until: float
) -> dict[str, str]:
    """Return the members that are to blame, each with a reason; empty if all are still in the epoch.

    Args:
        members: The members to ask.
        attempted: The commit of this epoch. A member that has left refuses it, and the refusal says what happened.
        settle_s: How long they have to answer, in seconds.
        patient_until: Monotonic time up to which several silent members are waited for longer.
    """

    async def why(member: Member) -> str | None:
        try:
            if (await member.replica.info(timeout_s=2 * settle_s)).epoch == attempted.epoch:
                return None
            await member.replica.commit(attempted, timeout_s=settle_s)
        except HeadraceError as error:
            return str(error)
        return "it left in the middle of the transfer"

    asked = {name: asyncio.create_task(why(member), name=f"push ask {name}") for name, member in members.items()}
    try:
        await asyncio.wait(asked.values(), timeout=settle_s)
        if not _left(asked):
            await until_one_is_silent(asked, settle_s=settle_s, patient_until=patient_until)
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


async def until_one_is_silent(tasks: Mapping[str, asyncio.Task[Any]], *, settle_s: float, patient_until: float) -> None:
    """Wait until at most one task is unfinished, for at most ``settle_s`` and until ``patient_until``."""
    until = min(time.monotonic() + settle_s, patient_until)
    while len(silent := [task for task in tasks.values() if not task.done()]) > 1:
        left = until - time.monotonic()
        if left <= 0:
            return
        await asyncio.wait(silent, timeout=left, return_when=asyncio.FIRST_COMPLETED)


def _left(asked: Mapping[str, asyncio.Task[str | None]]) -> dict[str, str]:
    return {name: reason for name, task in asked.items() if task.done() and (reason := task.result()) is not None}
