"""Shares a few warm reward workers among many callers, and replaces those that had to be killed.

    lane A: [call, call, call] --+
    lane B: [call] --------------+--> next free worker --> started --> answered        --> free again
    lane C: [call, call] --------+    lanes take turns            +--> deadline, crash --> killed and replaced

A lane is a run, or the HTTP routes: one with many or slow calls makes the others wait for a worker, not for its queue.
A function's deadline does not run while it queues, nor while its module is imported; each of those has its own.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import Any, Self

import msgspec

from services.rewarder.module_sources import Sources
from services.rewarder.reward_call import describe
from services.rewarder.reward_worker import Limits
from services.rewarder.rewarder_metrics import RewarderMetrics, lane_kind
from services.rewarder.worker_frames import Answer, Inspect, Inspected, Refused, Reply, Started, Task
from services.rewarder.worker_process import WorkerDiedError, WorkerProcess
from shared.messages import Outcome

log = logging.getLogger(__name__)

_RESTART_PAUSE_S = 1.0


class RewardFailure(Exception):  # noqa: N818  not an error of ours: it is what the function's outcome will be
    """The call gave no answer.

    Args:
        outcome: Anything but ``scored``.
        detail: One sentence.
        seconds: How long it was worked on, waiting for a turn not included.
    """

    def __init__(self, outcome: Outcome, detail: str, *, seconds: float = 0.0) -> None:
        super().__init__(detail)
        self.outcome: Outcome = outcome
        self.detail = detail
        self.seconds = seconds
        self.version = ""
        """Of what gave no answer, as in ``Answer``; set by who knows it."""


class WorkerPool:
    """``num_workers`` processes for synchronous reward functions; an async context manager."""

    def __init__(
        self,
        *,
        num_workers: int,
        limits: Limits,
        queue_timeout_s: float,
        import_timeout_s: float,
        metrics: RewarderMetrics,
    ) -> None:
        self._num_workers = num_workers
        self._limits = limits
        self._queue_timeout_s = queue_timeout_s
        self._import_timeout_s = import_timeout_s
        self._metrics = metrics
        self._idle: deque[WorkerProcess] = deque()
        self._waiting: dict[str, deque[asyncio.Future[WorkerProcess]]] = {}
        self._replacing: set[asyncio.Task[object]] = set()
        self._alive: set[WorkerProcess] = set()
        self._generation = 0
        self._is_closing = False
        num_inspections = max(2, num_workers)
        self._inspections = asyncio.Semaphore(num_inspections)
        self._background_inspections = asyncio.Semaphore(num_inspections - 1)  # one is left for who waits

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(self._start_one() for _ in range(self._num_workers)))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._close()

    @property
    def num_alive(self) -> int:
        """Workers that are up, busy or idle."""
        return sum(not worker.is_gone for worker in self._alive)

    async def call(
        self,
        function: str,
        call: bytes,
        *,
        lane: str,
        timeout_s: float,
        sources: Sources | None = None,
    ) -> tuple[Answer, float]:
        """Run one reward function in a worker; return its answer and the seconds it ran.

        ``sources`` is the version of its module. A worker that has imported another version of one of its files is
        replaced first.

        Raises:
            RewardFailure: No worker got free, a deadline passed, or the worker died.
        """
        worker = await self._acquire(lane)
        while sources is not None and worker.has_other_versions(sources):
            self._in_background(self._discard(worker, reason="renewed"))
            worker = await self._acquire(lane)
        began_at = time.monotonic()
        try:
            task = Task(function, msgspec.Raw(call), timeout_s, self._import_timeout_s)
            if sources is not None:
                task = msgspec.structs.replace(task, version=sources.key, sources=worker.give(sources))
            answer, seconds = await self._converse(worker, task, timeout_s)
        except WorkerDiedError as error:
            exit_code = await self._discard(worker, reason="died")
            detail = f"its worker process died with exit code {exit_code} ({_what_killed(exit_code)})"
            raise RewardFailure("error", detail, seconds=time.monotonic() - began_at) from error
        except RewardFailure as failure:
            await self._discard(worker, reason=failure.outcome)
            raise
        except BaseException:  # cancelled: the run is over, and nobody will ever take the answer
            self._in_background(self._discard(worker, reason="cancelled"))
            raise
        self._release(worker)
        return answer, seconds

    async def inspect(
        self,
        function: str,
        *,
        timeout_s: float,
        sources: Sources | None = None,
        kwargs: Mapping[str, Any] | None = None,
        in_background: bool = False,
    ) -> Inspected | Refused:
        """Import the function's module in a process made for it, in this version or as its files are now.

        Args:
            function: Its name.
            timeout_s: Deadline of all of it: waiting until few enough others are imported, the process, the import.
            sources: The version.
            kwargs: What it would be given. The columns in the answer are those that it needs without.
            in_background: Nobody waits for this: it leaves room for those that somebody waits for.
        """
        module = function.partition(":")[0]
        shown_s = f"{round(timeout_s, 1):g}"
        is_begun = False
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._background_inspections if in_background else contextlib.nullcontext(),
                self._inspections,
            ):
                is_begun = True
                reply = await self._ask_new_process(Inspect(function, dict(kwargs or {}), sources))
        except TimeoutError:
            if not is_begun:
                return Refused(f"{module} had to wait for {shown_s} s while others were imported; try again")
            return Refused(f"importing {module} took longer than {shown_s} s")
        if not isinstance(reply, Inspected | Refused):
            return Refused(f"the reward worker said {type(reply).__name__}")
        return reply

    async def _ask_new_process(self, request: Inspect) -> Reply:
        module = request.function.partition(":")[0]
        try:
            worker = await WorkerProcess.start(self._limits)
        except (OSError, WorkerDiedError) as error:
            return Refused(f"no process could be started to import {module} ({describe(error)}); try again")
        try:
            await worker.send(request)
            return await worker.receive()
        except WorkerDiedError:
            exit_code = await worker.kill()
            return Refused(f"importing {module} killed its process (exit code {exit_code})")
        finally:
            await worker.kill()

    def renew(self) -> None:
        """Replace every worker once it is free, so that changed modules are imported anew."""
        self._generation += 1
        idle, self._idle = self._idle, deque()
        for worker in idle:
            self._in_background(self._discard(worker, reason="renewed"))

    async def _converse(self, worker: WorkerProcess, task: Task, timeout_s: float) -> tuple[Answer, float]:
        try:
            async with asyncio.timeout(self._import_timeout_s):
                await worker.send(task)
                started = await worker.receive()
        except TimeoutError as error:
            detail = f"importing its module took longer than {self._import_timeout_s:g} s"
            raise RewardFailure("timeout", detail, seconds=self._import_timeout_s) from error
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await worker.receive()
        except TimeoutError as error:
            detail = f"took longer than {timeout_s:g} s and was killed"
            raise RewardFailure("timeout", detail, seconds=timeout_s) from error
        if not isinstance(started, Started) or not isinstance(answer, Answer):
            raise RewardFailure("error", "its worker process broke the protocol")
        return answer, time.monotonic() - started_at

    async def _acquire(self, lane: str) -> WorkerProcess:
        while self._idle:
            worker = self._idle.popleft()
            if not worker.is_gone:
                return worker
            self._in_background(self._discard(worker, reason="died"))
        waiter: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(lane, deque()).append(waiter)
        try:
            with self._metrics.queued.labels("workers", lane_kind(lane)).track_inprogress():
                async with asyncio.timeout(self._queue_timeout_s):
                    return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                self._release(waiter.result())
            if isinstance(error, TimeoutError):
                detail = (
                    f"no reward worker got free within {self._queue_timeout_s:g} s; set HEADRACE_NUM_REWARD_WORKERS"
                )
                raise RewardFailure("overload", detail) from error
            raise

    def _release(self, worker: WorkerProcess) -> None:
        if worker.generation < self._generation:
            self._in_background(self._discard(worker, reason="renewed"))
            return
        while self._waiting:
            lane = next(iter(self._waiting))
            queue = self._waiting.pop(lane)
            waiter = queue.popleft()
            if queue:
                self._waiting[lane] = queue  # at the end: the lanes take turns
            if not waiter.done():
                waiter.set_result(worker)
                return
        self._idle.append(worker)

    async def _discard(self, worker: WorkerProcess, *, reason: str) -> int | None:
        self._alive.discard(worker)
        self._metrics.worker_kills.labels(reason).inc()
        self._in_background(self._replace())
        return await worker.kill()

    async def _replace(self) -> None:
        while not self._is_closing:
            try:
                await self._start_one()
            except (OSError, WorkerDiedError) as error:  # TimeoutError is an OSError
                log.error("no new reward worker could be started (%s), trying again", error)  # noqa: TRY400
                await asyncio.sleep(_RESTART_PAUSE_S)
            else:
                return

    async def _start_one(self) -> None:
        generation = self._generation
        worker = await WorkerProcess.start(self._limits)
        if self._is_closing:
            await worker.kill()
            return
        worker.generation = generation
        self._alive.add(worker)
        self._release(worker)

    def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work, name="reward worker replacement")
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _close(self) -> None:
        self._is_closing = True
        await asyncio.gather(*(worker.kill() for worker in self._alive))
        while self._replacing:
            await asyncio.gather(*self._replacing, return_exceptions=True)
        self._alive.clear()
        self._idle.clear()


def _what_killed(exit_code: int | None) -> str:
    if exit_code is None:
        return "it could not be killed"
    return f"signal {-exit_code}" if exit_code < 0 else "it called exit"
