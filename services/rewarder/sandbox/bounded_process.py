"""Runs a command with a bound on its time and on what it may say, and kills it at either."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from services.rewarder.sandbox.sandbox import Finished

_STDERR_BYTES = 8 << 10
_PART_BYTES = 1 << 16
_DRAIN_S = 60.0
"""Nobody holds the other end once the command is dead; a machine that stalls may take long to notice."""


class _TooMuchError(Exception):
    """More output than there may be."""


async def run_bounded(
    command: Sequence[str], *, stdin: bytes, wall_s: float, output_bytes: int, identity: Mapping[str, Any]
) -> Finished:
    """Return how the command ended.

    Args:
        command: Its arguments.
        stdin: All it gets to read.
        wall_s: Seconds, then it is killed.
        output_bytes: Of stdout, then it is killed.
        identity: ``user``, ``group``, ``extra_groups`` as subprocess has them; empty to stay who we are.

    Raises:
        OSError: It could not be started.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, env={}, cwd="/", **identity
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr = bytearray(), bytearray()
    ended: Literal["exited", "wall clock", "output"] = "exited"
    try:
        async with asyncio.timeout(wall_s):
            await asyncio.gather(
                _feed(process.stdin, stdin),
                _read(process.stdout, stdout, output_bytes, stop_beyond=True),
                _read(process.stderr, stderr, _STDERR_BYTES, stop_beyond=False),
            )
            await process.wait()
    except TimeoutError:
        ended = "wall clock"
    except _TooMuchError:
        ended = "output"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        # Only a pipe that was read to its end is closed; what is in it is not kept.
        async with asyncio.timeout(_DRAIN_S):
            await asyncio.gather(_drain(process.stdout), _drain(process.stderr))
    return Finished(ended, process.returncode if ended == "exited" else None, bytes(stdout), bytes(stderr))


async def _feed(pipe: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read
        pipe.write(content)
        await pipe.drain()
    pipe.close()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        await pipe.wait_closed()


async def _drain(pipe: asyncio.StreamReader) -> None:
    while await pipe.read(_PART_BYTES):
        pass


async def _read(pipe: asyncio.StreamReader, into: bytearray, max_bytes: int, *, stop_beyond: bool) -> None:
    while part := await pipe.read(_PART_BYTES):
        into += part[: max_bytes - len(into)]
        if stop_beyond and len(part) > 0 and len(into) == max_bytes:
            raise _TooMuchError
