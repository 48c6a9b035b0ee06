"""A command whose output is limited can always be ended, also with full pipes. This does not need a sandbox."""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.rewarder.sandbox import bounded_process
from services.rewarder.sandbox.bounded_process import run_bounded
from tests.rewarder.conftest import descendants, is_running, until

YES = shutil.which("yes") or "yes"
RUN: dict[str, Any] = {"stdin": b"", "wall_s": 100.0, "output_bytes": 1000, "identity": {}}


def state(pid: int) -> str:
    """Return the state of a process as the letter in /proc."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def until_its_pipe_is_full(pid: int) -> None:
    """Wait until a process that only writes is found blocked each time."""
    num_blocked = 0

    async def is_blocked() -> bool:
        nonlocal num_blocked
        num_blocked = num_blocked + 1 if state(pid) == "S" else 0
        return num_blocked == 20

    await until(is_blocked, what="a full pipe")


async def test_a_flood_that_has_filled_every_buffer_when_it_is_killed_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def kill_late(pid: int) -> None:
        await until_its_pipe_is_full(pid)
        os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(bounded_process, "_kill_with_children", kill_late)
    async with asyncio.timeout(100):
        finished = await run_bounded([YES], **RUN)
    assert (finished.ended, len(finished.stdout)) == ("output", 1000)
    assert caplog.messages == [], "it warned of open pipes, although no process holds them"


async def test_a_command_whose_caller_is_cancelled_while_it_is_stopped_leaves_nothing_stopped_or_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def start_and_tell(*command: str, **options: Any) -> asyncio.subprocess.Process:
        started.append(await start(*command, **options))
        return started[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_tell)
    parent_of: Callable[[int], tuple[str, int]] = getattr(bounded_process, "_state_and_parent")  # noqa: B009  private
    asked: list[int] = []

    def never_seen_stopped(pid: int) -> tuple[str, int]:
        asked.append(pid)
        return "R", parent_of(pid)[1]

    monkeypatch.setattr(bounded_process, "_state_and_parent", never_seen_stopped)
    running = asyncio.create_task(run_bounded(["/bin/sh", "-c", "sleep 1000 & yes"], **RUN))

    async def is_being_stopped() -> bool:
        return bool(asked)

    await until(is_being_stopped, what="the stop")
    pids = {asked[0], *descendants(asked[0])}
    assert len(pids) > 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert started[0].returncode is not None, "its end was waited for"

    async def is_gone() -> bool:
        return not any(map(is_running, pids))

    await until(is_gone, what="the end of the command and its children")
