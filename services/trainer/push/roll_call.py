"""Asks the members of an epoch who is still in it, and tells one that is stopped from others that are slow.

    all asked --settle_s--> who left has said so, or cannot be reached: they are to blame
                      |---> one is silent: it is to blame
                      +---> several are: they get as long again, until one is left

A stopped process keeps its connections, so for a while it looks like one on a machine with too much to do.
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
    """Return the members that are to blame, each with a reason; none if all say that they are in the epoch.

    Args:
        members: Who is asked.
        attempted: The commit that has nothing to be done for in a member that has left; its refusal says what happened.
        settle_s: How long they have to answer.
        patient_until: Monotonic time until which several that are silent are waited for longer.
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
    """Wait for several that have not answered yet, until at most one of them is left, or time is up."""
    until = min(time.monotonic() + settle_s, patient_until)
    while len(silent := [task for task in tasks.values() if not task.done()]) > 1:
        left = until - time.monotonic()
        if left <= 0:
            return
        await asyncio.wait(silent, timeout=left, return_when=asyncio.FIRST_COMPLETED)


def _left(asked: Mapping[str, asyncio.Task[str | None]]) -> dict[str, str]:
    return {name: reason for name, task in asked.items() if task.done() and (reason := task.result()) is not None}
