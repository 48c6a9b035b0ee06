"""The service's end of a model's process: start it, exchange frames with it, kill it with all it has spawned.

The process is started from scratch: it alone imports torch, and a GPU cannot be used in a fork. It gets nothing of the
service's settings but what the first frame says, so no key of headrace's is in its environment.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

import services
from services.rewarder.reward_models.model_frames import Reply, Request, decode_reply
from services.rewarder.worker_frames import HEADER, MAX_FRAME_BYTES

_MODULE = "services.rewarder.reward_models.model_worker"


class ModelDiedError(Exception):
    """The process has closed its socket: it ended, crashed or was killed."""


class ModelProcess:
    """Made by ``start``, ended by ``kill``."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls) -> Self:
        """Return a process that waits for a Load; raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # a folder called `services` where the rewarder was started must not win over ours
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
        """Of the process, for logs."""
        return self._process.pid

    def send(self, request: Request) -> None:
        """Send a frame, without waiting until it is read; what cannot be sent any more is noticed by ``receive``."""
        body = msgspec.msgpack.encode(request)
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(HEADER.pack(len(body)) + body)

    async def receive(self) -> Reply:
        """Return the next reply; raises ModelDiedError."""
        try:
            (num_bytes,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if num_bytes > MAX_FRAME_BYTES:
                raise ModelDiedError(f"it answered {num_bytes} bytes")
            reply: Reply = decode_reply(await self._reader.readexactly(num_bytes))
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError) as error:
            raise ModelDiedError("its socket is closed") from error
        return reply

    async def kill(self) -> int:
        """SIGKILL it unless it has ended, and return its exit code, negative if a signal ended it.

        Whoever is cancelled meanwhile is so only when it has ended.
        """
        ending = asyncio.create_task(self._end(), name="end of a reward model's process")
        try:
            return await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _end(self) -> int:
        self._writer.transport.abort()
        if self._process.returncode is None:
            with contextlib.suppress(TimeoutError):
                # Ended by itself, it has an exit code of its own, which says more than ours.
                async with asyncio.timeout(0.2):
                    await self._process.wait()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        exit_code = await self._process.wait()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        return exit_code


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    root = str(Path(services.__file__ or "").resolve().parent.parent)
    kept = {name: value for name, value in ours.items() if not name.startswith("HEADRACE_")}
    path = os.pathsep.join(part for part in (root, ours.get("PYTHONPATH", "")) if part)
    return kept | {"PYTHONPATH": path, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
