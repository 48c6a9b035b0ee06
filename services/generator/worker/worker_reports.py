"""Sends the progress of vLLM's workers in a push to the generator's process over a Unix socket of this machine.

    worker's thread --datagram--> socket of the generator process --> progress of every worker

A call through the engine is answered only between two decode steps, and asking that way would cost a push one such wait
for every question. Reports may get lost, and workers on other machines send none. If a report is missing, the caller
asks through the engine.
"""

import asyncio
import contextlib
import json
import socket
import tempfile
from pathlib import Path
from typing import NamedTuple

ENTERING, CHECKING, RECEIVING, IDLE = "entering", "checking", "receiving", "idle"
"""Phases of a worker."""
FAILURE = "failure"
"""Key of the reason in the answer of a worker whose move failed."""
_MAX_BYTES = 32 * 1024
_MAX_FAILURE_CHARACTERS = 2000
_LOST_S = 0.5


class Progress(NamedTuple):
    """The progress of one worker in a push. vLLM's RPC transmits it as a plain tuple.

    Attributes:
        phase: The current phase of the worker.
        failure: Why its last job failed; None if it did not fail.
        checksum: Checksum of the received weights; None if they are not complete.
    """

    phase: str
    failure: str | None
    checksum: str | None


class ReportTo(NamedTuple):
    """Address for the progress reports of a worker's next job. vLLM's RPC transmits it as a plain tuple.

    Attributes:
        path: Path of the Unix socket that receives the reports.
        job: Number of the job that is reported on.
    """

    path: str
    job: int

    def send(self, rank: int, progress: Progress) -> None:
        """Send a report, without waiting and without an error if no process listens."""
        failure = progress.failure and progress.failure[:_MAX_FAILURE_CHARACTERS]
        report = json.dumps([self.job, rank, progress.phase, failure, progress.checksum]).encode()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.sendto(report, socket.MSG_DONTWAIT, self.path)


class WorkerReports:
    """Receives the progress reports of an engine's workers. It must be created and closed on the event loop."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._directory = tempfile.TemporaryDirectory(prefix="headrace-push-")
        self._path = str(Path(self._directory.name) / "reports")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self._path)
        self._job = 0
        self._heard: dict[int, Progress] = {}
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)

    def begin(self) -> ReportTo:
        """Forget earlier reports, and return the address to which workers report on their next job."""
        self._job += 1
        self._heard = {}
        return ReportTo(self._path, self._job)

    async def wait(self, timeout_s: float) -> list[Progress] | None:
        """Wait for new reports on this job, and return every worker's latest one; None if they did not come in time.

        Args:
            timeout_s: Longest wait, in seconds; at least 0.5 s if every worker has already reported on this job.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(timeout_s, _LOST_S) if self._is_complete else timeout_s):
                while not self._is_complete or not self._news.is_set():
                    self._news.clear()
                    await self._news.wait()
                self._news.clear()
                return list(self._heard.values())
        return None

    @property
    def _is_complete(self) -> bool:
        return len(self._heard) == self._num_workers

    def close(self) -> None:
        """Stop listening, and delete the socket's directory."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._directory.cleanup()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                job, rank, *progress = json.loads(self._socket.recv(_MAX_BYTES))
                if job == self._job:
                    self._heard[rank] = Progress(*progress)
                    self._news.set()
