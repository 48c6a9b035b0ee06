"""The service's side of a worker: starts it, exchanges frames with it, and kills it.

Killing a worker kills its whole process session.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from typing import Any, Generic, Self

import msgspec

from shared.service.cancellation import seen_through
from shared.user_code import fork_server
from shared.user_code.call_failure import CallFailure
from shared.user_code.fork_server import StartedWorker, WorkerStartError
from shared.user_code.limits import Limits
from shared.user_code.module_sources import SourceFile, Sources
from shared.user_code.task_kind import AnswerT, DescriptionT, TaskKind, decode_reply
from shared.user_code.worker_frames import (
    HEADER,
    MAX_FRAME_BYTES,
    Ready,
    Refused,
    Reply,
    Request,
    Started,
    Task,
    encode_frame_body,
)

_SET_UP_TIMEOUT_S = 60.0
_LINGER_S = 10.0
"""Seconds that a worker may take to end after it has closed its socket."""


class WorkerDiedError(Exception):
    """A worker process has died, or cannot be used any more.

    Args:
        why: The reason, as text that continues "its worker process died:". Empty if the worker crashed, exited or was
            killed, and so closed its socket; then ``kill`` returns the reason.
    """

    def __init__(self, why: str = "") -> None:
        super().__init__(why or "its socket is closed")
        self.why = why


class WorkerProcess(Generic[AnswerT, DescriptionT]):
    """A process that runs users' functions, one request at a time. ``start`` makes it and ``kill`` ends it."""

    def __init__(
        self,
        kind: TaskKind[AnswerT, DescriptionT],
        process: StartedWorker,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._kind = kind
        self._process = process
        self._reader = reader
        self._writer = writer
        self._ending: asyncio.Task[str] | None = None
        self._versions: set[str] = set()
        self._modules: set[str] = set()
        """The versions of modules that were called, or the modules' names if they have no version."""
        self._files: dict[str, SourceFile] = {}
        self.generation = 0

    @classmethod
    async def start(cls, limits: Limits, kind: TaskKind[AnswerT, DescriptionT]) -> Self:
        """Start a worker process and wait until it takes requests. Raises WorkerStartError."""
        worker = cls(kind, *await _connect_new_process(limits, kind))
        try:
            async with asyncio.timeout(_SET_UP_TIMEOUT_S):
                reply = await worker.receive()
        except TimeoutError as error:
            await worker.kill()
            raise WorkerStartError(f"it was not ready within {_SET_UP_TIMEOUT_S:g} s") from error
        except WorkerDiedError as error:
            how = await worker.kill()
            raise WorkerStartError(f"during its setup, {error.why or how}") from error
        except BaseException:
            await worker.kill()
            raise
        if not isinstance(reply, Ready):
            await worker.kill()
            raise WorkerStartError(f"a new worker sent an unexpected {type(reply).__name__}")
        return worker

    @property
    def is_gone(self) -> bool:
        """Whether the worker has closed its socket."""
        return self._reader.at_eof()

    def has_other_versions(self, sources: Sources) -> bool:
        """Return whether the worker has another version of one of these files in memory."""
        return any(self._files.get(file.module, file) != file for file in sources.files)

    def was_given(self, module: str) -> bool:
        """Return whether the worker has a version of this module in memory."""
        return module in self._files

    @property
    def has_several(self) -> bool:
        """Whether the worker has several modules or versions in memory, which share its memory limit."""
        return len(self._modules) > 1

    def give(self, sources: Sources) -> Sources | None:
        """Note that the worker gets this version. Return it if it must be sent, or None if the worker has it."""
        if sources.key in self._versions:
            return None
        self._versions.add(sources.key)
        self._files |= {file.module: file for file in sources.files}
        return sources

    async def answer(self, task: Task) -> tuple[AnswerT | Refused, float]:
        """Send a task; return its answer, or `Refused` if its function cannot be loaded, and the seconds that it ran.

        Raises:
            CallFailure: A deadline passed, or the worker broke the protocol. The worker must be killed.
            WorkerDiedError: The worker died, or was stopped.
        """
        self._modules.add(task.version or task.function.partition(":")[0])
        try:
            async with asyncio.timeout(task.import_timeout_s):
                await self.send(task)
                started = await self.receive()
        except TimeoutError as error:
            self._require_not_stopped()
            detail = f"importing its module took longer than {task.import_timeout_s:g} s"
            raise CallFailure("timeout", detail, seconds=task.import_timeout_s) from error
        if isinstance(started, Refused):
            return started, 0.0
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(task.timeout_s):
                answer = await self.receive()
        except TimeoutError as error:
            self._require_not_stopped()
            detail = f"took longer than {task.timeout_s:g} s and was killed"
            raise CallFailure("timeout", detail, seconds=task.timeout_s) from error
        if not isinstance(started, Started) or not isinstance(answer, self._kind.answer_type):
            raise CallFailure("error", "its worker process broke the protocol")
        return answer, time.monotonic() - started_at

    def _require_not_stopped(self) -> None:
        """Raise WorkerDiedError if the process is stopped (SIGSTOP), because then the call is not at fault."""
        if self._process.pid is not None and fork_server.state_of(self._process.pid) in ("T", "t"):
            raise WorkerDiedError("it was stopped (SIGSTOP) past its deadline, and killed")

    async def send(self, request: Request) -> None:
        """Send a request. Raises WorkerDiedError if the worker has closed its socket."""
        body = encode_frame_body(request)
        self._writer.write(HEADER.pack(len(body)) + body)
        try:
            await self._writer.drain()
        except OSError as error:
            raise WorkerDiedError from error

    async def receive(self) -> Reply | AnswerT | DescriptionT:
        """Return the next reply. Raises WorkerDiedError if the socket closes, or the reply is invalid or too large."""
        try:
            (num_bytes,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if num_bytes > MAX_FRAME_BYTES:
                raise WorkerDiedError(f"it tried to send {num_bytes} bytes, and was killed")
            reply = decode_reply(self._kind, await self._reader.readexactly(num_bytes))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WorkerDiedError from error
        except msgspec.DecodeError as error:  # user code can reach the socket and write to it
            raise WorkerDiedError("it sent an invalid reply, and was killed") from error
        return reply

    async def kill(self) -> str:
        """Kill the worker and all its children; return how it ended. May be called more than once.

        If cancelled, wait for the end of the worker first.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(), name="end of a worker")
        return await seen_through(self._ending)

    async def _end(self) -> str:
        lingers = False
        if self.is_gone and not self._process.has_ended:
            # It is about to end by itself, and its own exit code says more than that of our signal.
            lingers = not await asyncio.to_thread(self._process.wait, _LINGER_S)
        self._writer.transport.abort()
        pid = self._process.pid
        if pid is not None:
            has_ended = self._process.has_ended
            try:
                os.killpg(pid, signal.SIGKILL)  # its children may still run even if the worker has ended by itself
            except (ProcessLookupError, PermissionError):  # it does not lead its session yet, or all have ended
                if not has_ended:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        how = await asyncio.to_thread(self._process.how_it_ended)
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        return "it closed its socket without ending, and was killed" if lingers else how


async def _connect_new_process(
    limits: Limits, kind: TaskKind[Any, Any]
) -> tuple[StartedWorker, asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        raise WorkerStartError(str(error)) from error
    try:
        process = await asyncio.wrap_future(fork_server.start(theirs, limits, kind))
        reader, writer = await asyncio.open_connection(sock=ours)
    except BaseException:
        ours.close()  # if the worker starts anyway, it reads the end of file and ends
        raise
    return process, reader, writer
