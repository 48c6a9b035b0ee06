"""Runs a command with limits on its time and its output, and kills it when it reaches a limit."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from services.rewarder.sandbox.sandbox import Finished

log = logging.getLogger(__name__)

_STDERR_BYTES = 8 << 10
_PART_BYTES = 1 << 16
_STOP_POLL_S, _STOP_POLLS = 0.002, 1000
_DRAIN_S = 10.0
"""Seconds to wait for the pipes to close after the command has been killed. It takes long only on a stalled machine."""


async def run_bounded(
    command: Sequence[str], *, stdin: bytes, wall_s: float, output_bytes: int, identity: Mapping[str, Any]
) -> Finished:
    """Run the command and return how it ended. If cancelled, kill the command and wait for its end first.

    Args:
        command: The command line.
        stdin: The bytes that the command can read.
        wall_s: Seconds after which the command is killed.
        output_bytes: Bytes of stdout after which the command is killed.
        identity: ``user``, ``group`` and ``extra_groups`` for subprocess; empty to keep the current user.

    Raises:
        OSError: The command could not be started.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, env={}, cwd="/", **identity
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr = bytearray(), bytearray()
    beside = [
        asyncio.create_task(_feed(process.stdin, stdin), name="stdin of a program"),
        asyncio.create_task(_read(process.stderr, stderr, _STDERR_BYTES), name="stderr of a program"),
    ]
    ended: Literal["exited", "wall clock", "output"] = "exited"
    try:
        async with asyncio.timeout(wall_s):
            if await _read(process.stdout, stdout, output_bytes, stop_beyond=True):
                ended = "output"
            else:
                await process.wait()
    except TimeoutError:
        ended = "wall clock"
    finally:
        try:
            if process.returncode is None:
                await _kill_with_children(process.pid)
            # Wait and drain at the same time: in Python 3.11 wait() returns only when all pipes are disconnected, and a
            # StreamReader that holds more than 128 KiB stops reading its pipe. Waiting first would wait for ever.
            async with asyncio.timeout(_DRAIN_S):
                await asyncio.gather(process.wait(), *beside, _read(process.stdout, stdout, output_bytes))
        except TimeoutError:
            log.warning(
                "the pipes of a program in the sandbox were still open %g s after its end, and are closed now", _DRAIN_S
            )
        finally:
            for task in beside:
                task.cancel()
            getattr(process, "_transport").close()  # noqa: B009  private, but the only way to close the pipes
            # A cancelled gather above has not waited. The process must end before the event loop is closed: a closed
            # loop is not notified of the end.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_S):
                    await process.wait()
    return Finished(ended, process.returncode if ended == "exited" else None, bytes(stdout), bytes(stderr))


async def _kill_with_children(pid: int) -> None:
    """Kill a process and its children. Stop the process first, so that it cannot start children meanwhile.

    Only at the end of its setup does bwrap ask the kernel to kill its child when bwrap dies. If bwrap were killed
    earlier, its sandbox would keep running without supervision.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(_STOP_POLLS):
                if _state_and_parent(pid)[0] in "TtZX":
                    break
                await asyncio.sleep(_STOP_POLL_S)
        finally:  # also on cancellation: leaves no process running or stopped
            for child in _processes():
                with contextlib.suppress(ProcessLookupError):
                    if _state_and_parent(child)[1] == pid:
                        os.kill(child, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _state_and_parent(pid: int) -> tuple[str, int]:
    """Return the state of a process, as its letter in /proc, and its parent's id; raises ProcessLookupError."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except FileNotFoundError as error:
        raise ProcessLookupError from error
    return fields[0], int(fields[1])


async def _feed(pipe: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the program may ignore its stdin
        pipe.write(content)
        await pipe.drain()
    pipe.close()


async def _read(pipe: asyncio.StreamReader, into: bytearray, max_bytes: int, *, stop_beyond: bool = False) -> bool:
    """Read a pipe to its end, and keep the first ``max_bytes`` bytes in ``into``.

    With ``stop_beyond``, stop when ``into`` has ``max_bytes``, and return whether it stopped there.
    """
    while part := await pipe.read(_PART_BYTES):
        into += part[: max_bytes - len(into)]
        if stop_beyond and len(into) == max_bytes:
            return True
    return False
