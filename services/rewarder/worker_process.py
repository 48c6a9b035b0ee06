"""The service's end of one reward worker: start it, talk to it under deadlines, kill it.

Started by a fork server that has math-verify loaded: about 10 ms. Killing takes the worker's whole session with it.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import threading
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Self

import msgspec

from services.rewarder import reward_worker
from services.rewarder.module_sources import SourceFile, Sources
from services.rewarder.reward_worker import Limits
from services.rewarder.worker_frames import (
    HEADER,
    MAX_FRAME_BYTES,
    Ready,
    Reply,
    Request,
    decode_reply,
    encode_frame_body,
)

PRELOAD = ["services.rewarder.reward_worker", "services.rewarder.built_ins.accuracy"]
_START_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 5.0
# Process.start reads the exit codes of all ended processes. An exit code can be read once: a second reader gets 255.
_exit_codes = threading.Lock()


class WorkerDiedError(Exception):
    """The worker closed its socket: it crashed, exited or was killed."""


class WorkerProcess:
    """One worker. Made by ``start``, ended by ``kill``; one conversation at a time."""

    def __init__(self, process: ForkServerProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._is_killed = False
        self._exit_code: int | None = None
        self._versions: set[str] = set()
        self._files: dict[str, SourceFile] = {}
        self.generation = 0

    @classmethod
    async def start(cls, limits: Limits) -> Self:
        """Return a worker that waits for requests.

        Raises:
            OSError: No process could be made.
            WorkerDiedError: It ended while setting itself up.
            TimeoutError: It was not ready within a minute.
        """
        async with asyncio.timeout(_START_TIMEOUT_S):
            worker = cls(*await _connect_new_process(limits))
            try:
                reply = await worker.receive()
            except BaseException:
                await worker.kill()
                raise
        if not isinstance(reply, Ready):
            await worker.kill()
            raise WorkerDiedError(f"a new reward worker said {type(reply).__name__}")
        return worker

    @property
    def is_gone(self) -> bool:
        """Whether the worker has closed its socket."""
        return self._reader.at_eof()

    def has_other_versions(self, sources: Sources) -> bool:
        """Whether the worker was given another version of one of these files."""
        return any(self._files.get(file.module, file) != file for file in sources.files)

    def give(self, sources: Sources) -> Sources | None:
        """Return what has to be sent so that the worker has this version: None if it has it."""
        if sources.key in self._versions:
            return None
        self._versions.add(sources.key)
        self._files |= {file.module: file for file in sources.files}
        return sources

    async def send(self, request: Request) -> None:
        """Send a request; raises WorkerDiedError."""
        body = encode_frame_body(request)
        self._writer.write(HEADER.pack(len(body)) + body)
        try:
            await self._writer.drain()
        except OSError as error:
            raise WorkerDiedError("its socket is closed") from error

    async def receive(self) -> Reply:
        """Return the next reply; raises WorkerDiedError."""
        try:
            (num_bytes,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if num_bytes > MAX_FRAME_BYTES:
                raise WorkerDiedError(f"it answered {num_bytes} bytes")
            reply: Reply = decode_reply(await self._reader.readexactly(num_bytes))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WorkerDiedError("its socket is closed") from error
        except msgspec.DecodeError as error:  # user code can reach the socket, and what is sent there
            raise WorkerDiedError("what it said cannot be read") from error
        return reply

    async def kill(self) -> int | None:
        """SIGKILL the worker and what it has spawned; return its exit code. May be called again."""
        if self._is_killed:
            return self._exit_code
        self._is_killed = True
        self._writer.transport.abort()
        pid = self._process.pid
        if pid is not None:
            has_ended = wait([self._process.sentinel], timeout=0)
            try:
                os.killpg(pid, signal.SIGKILL)  # what it has spawned may be there still when it has ended by itself
            except (ProcessLookupError, PermissionError):  # it has not made its session yet, or nothing is left
                if not has_ended:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self._exit_code = await asyncio.to_thread(_reap, self._process)
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        return self._exit_code


async def _connect_new_process(
    limits: Limits,
) -> tuple[ForkServerProcess, asyncio.StreamReader, asyncio.StreamWriter]:
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.to_thread(_spawn, theirs, limits)
        reader, writer = await asyncio.open_connection(sock=ours)
    except BaseException:
        ours.close()  # a worker that starts nevertheless reads the end of the file and ends
        raise
    finally:
        theirs.close()
    return process, reader, writer


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _spawn(channel: socket.socket, limits: Limits) -> ForkServerProcess:
    process = _context().Process(target=reward_worker.main, args=(channel, limits), name="reward worker")
    with _exit_codes:
        process.start()
    return process


def _reap(process: ForkServerProcess) -> int | None:
    wait([process.sentinel], _JOIN_TIMEOUT_S)
    with _exit_codes:
        exit_code = process.exitcode
        if exit_code is not None:
            process.close()
    return exit_code
