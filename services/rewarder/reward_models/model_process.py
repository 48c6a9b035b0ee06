"""The service's side of a reward model's process: starts it, exchanges frames with it, and kills it.

The process is not forked from the service: only it imports torch, and a GPU cannot be used in a fork. It gets only the
settings in the first frame. The HEADRACE_* variables, and so all of headrace's keys, are not in its environment. It is
killed together with its children.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

import services
from services.rewarder.reward_models.model_frames import Reply, Request, decode_reply
from shared.service.cancellation import seen_through
from shared.user_code.worker_frames import HEADER, MAX_FRAME_BYTES

_MODULE = "services.rewarder.reward_models.model_worker"


class ModelDiedError(Exception):
    """The model's process has ended or was killed, which closes its socket, or it has sent an invalid reply."""


class ModelProcess:
    """The process of one reward model, and the socket to it. ``start`` makes the process and ``kill`` ends it."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls) -> Self:
        """Start a process that waits for a ``Load`` request; raises OSError if it cannot be started."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # otherwise a folder called `services` in the working directory would be imported instead of ours
                "-m",
                _MODULE,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=_environment(os.environ),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            process.kill()
            await process.wait()
            raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        """The id of the model's process, for logs."""
        return self._process.pid

    def send(self, request: Request) -> None:
        """Send a request without waiting. Errors are ignored here, because ``receive`` then raises ModelDiedError."""
        body = msgspec.msgpack.encode(request)
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(HEADER.pack(len(body)) + body)

    async def receive(self) -> Reply:
        """Return the next reply of the process; raises ModelDiedError if the socket is closed or a reply is invalid."""
        try:
            (num_bytes,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if num_bytes > MAX_FRAME_BYTES:
                raise ModelDiedError(f"it answered {num_bytes} bytes")
            reply: Reply = decode_reply(await self._reader.readexactly(num_bytes))
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError) as error:
            raise ModelDiedError("its socket is closed") from error
        return reply

    async def kill(self) -> int:
        """Kill the process unless it ends within 0.2 s. Return its exit code, negative if a signal ended it.

        If cancelled, wait for the end of the process first.
        """
        return await seen_through(asyncio.create_task(self._end(), name="end of a reward model's process"))

    async def _end(self) -> int:
        self._writer.transport.abort()
        if self._process.returncode is None:
            with contextlib.suppress(TimeoutError):
                # If it is ending by itself, its own exit code says more than that of our SIGKILL.
                async with asyncio.timeout(0.2):
                    await self._process.wait()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        exit_code = await self._process.wait()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        return exit_code


@dataclass(frozen=True)
class Activity:
    """The current work of a model's process, and the time limit of this work.

    Args:
        ids: The ids of the calls that the process works on; empty while it loads the model.
        limit_s: Longest time for this work, in seconds.
        ends_at: End of that time, by the monotonic clock in seconds.
    """

    ids: frozenset[int]
    limit_s: float
    ends_at: float

    @classmethod
    def begun(cls, limit_s: float, ids: Iterable[int] = ()) -> Self:
        """Return an activity that begins now and may take ``limit_s`` seconds."""
        return cls(frozenset(ids), limit_s, time.monotonic() + limit_s)

    def left_s(self) -> float:
        """Return the seconds until the time limit of this work."""
        return max(0.0, self.ends_at - time.monotonic())


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    root = str(Path(services.__file__ or "").resolve().parent.parent)
    kept = {name: value for name, value in ours.items() if not name.startswith("HEADRACE_")}
    path = os.pathsep.join(part for part in (root, ours.get("PYTHONPATH", "")) if part)
    return kept | {"PYTHONPATH": path, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
