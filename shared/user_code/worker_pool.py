"""Shares a few warm worker processes among many callers of users' functions, and replaces killed workers.

    lane A: [call, call, call] --+
    lane B: [call] --------------+--> next free worker --> started --> answered        --> free again
    lane C: [call, call] --------+    lanes take turns            +--> deadline, crash --> killed and replaced

A lane is a run, or the HTTP routes, for example. If a lane has many or slow calls, other lanes wait for a free worker,
but not for that lane's whole queue. A function's deadline does not run while the call waits or while its module is
imported: both have limits of their own. A call whose worker died is tried once more, because the cause is not known. A
worker that finds no memory is replaced; if it has several modules, the call is tried in another.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from typing import Any, Generic, NoReturn, Protocol, Self

import msgspec

from shared.errors import UnavailableError
from shared.user_code.call_failure import CallFailure
from shared.user_code.fork_server import WorkerStartError, end_fork_server
from shared.user_code.inspections import Inspections
from shared.user_code.limits import Limits
from shared.user_code.module_sources import Sources
from shared.user_code.task_kind import AnswerT, DescriptionT, TaskKind
from shared.user_code.worker_frames import Refused, Task
from shared.user_code.worker_process import WorkerDiedError, WorkerProcess

log = logging.getLogger(__name__)

_RESTART_PAUSE_S = _LOOK_EVERY_S = 1.0
_GIVE_UP_AFTER_S, _GIVE_UP_AFTER_FAILURES = 60.0, 2
"""Seconds and failed starts without any worker after which the service ends.

A new process of the service, perhaps on another machine, may be able to start workers.
"""
_CLOSE_PATIENCE_S = 5.0
_MAX_SAID = 1000
_FORGOTTEN = -1
_MAX_DEATHS = 2
"""Workers that may die on one call. The first death may have another cause; after the second, the call is blamed."""


class _DiedOfItError(Exception):
    """A worker process died during a call; the call may be the cause."""

    def __init__(self, how: str, seconds: float) -> None:
        super().__init__(how)
        self.how = how
        self.seconds = seconds


class _FullError(Exception):
    """The modules in a worker leave no memory for the import or the call of another one."""


class PoolMetrics(Protocol):
    """Counts the replaced workers and the waiting calls of a pool."""

    def worker_replaced(self, reason: str) -> None:
        """Count a worker that is replaced: ``died``, ``renewed``, ``cancelled``, or the outcome of a failed call."""
        ...

    def waiting_for_worker(self, lane: str) -> AbstractContextManager[object]:
        """Count a call that waits for a worker, as long as the block runs."""
        ...


class WorkerPool(Generic[AnswerT, DescriptionT]):
    """A pool of ``num_workers`` processes that run users' functions. Use it as an async context manager.

    ``role`` names the kind of function in messages, and in the variable for ``num_workers``
    (HEADRACE_NUM_ROLE_WORKERS). By default it is the role of the kind's places.
    """

    def __init__(
        self,
        kind: TaskKind[AnswerT, DescriptionT],
        *,
        num_workers: int,
        limits: Limits,
        queue_timeout_s: float,
        import_timeout_s: float,
        metrics: PoolMetrics,
        role: str | None = None,
    ) -> None:
        self._kind = kind
        self._role = role or kind.places.role
        self._num_workers = num_workers
        self._limits = limits
        self._queue_timeout_s = queue_timeout_s
        self._import_timeout_s = import_timeout_s
        self._metrics = metrics
        self._idle: deque[WorkerProcess[AnswerT, DescriptionT]] = deque()
        self._waiting: dict[str, deque[asyncio.Future[WorkerProcess[AnswerT, DescriptionT]]]] = {}
        self._replacing: set[asyncio.Task[object]] = set()
        self._alive: set[WorkerProcess[AnswerT, DescriptionT]] = set()
        self._first_failure_at: float | None = None
        self._num_failures = 0
        self._failure: BaseException | None = None
        self._has_failed = asyncio.Event()
        self._freed_at = 0.0
        """When a call that waited got a worker the last time: a queue that moves has no deadline."""
        self._said: set[tuple[str, str]] = set()
        self._generation = 0
        self._is_closing = False
        self.inspections = Inspections(limits, kind, num_at_once=max(2, num_workers))
        """Inspections of functions that workers would import. They run in separate processes."""

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(self._replace() for _ in range(self._num_workers)))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._close()

    @property
    def num_alive(self) -> int:
        """The number of workers that are running, busy or idle."""
        return sum(not worker.is_gone for worker in self._alive)

    async def watch(self) -> NoReturn:
        """Replace workers that die while they are idle. Runs until replacing workers fails for good.

        Raises:
            UnavailableError: No worker could be started for a minute.
            BaseException: An unexpected error of a background task.
        """
        while self._failure is None:
            for worker in [worker for worker in self._idle if worker.is_gone]:
                self._idle.remove(worker)
                self._in_background(self._discard(worker, reason="died"))
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._has_failed.wait()
            except TimeoutError:
                continue
        raise self._failure

    async def call(
        self,
        function: str,
        call: bytes,
        *,
        lane: str,
        timeout_s: float,
        sources: Sources | None = None,
    ) -> tuple[AnswerT, float]:
        """Run a function in a worker; return its answer and the seconds that it ran.

        ``sources`` is the snapshot of the function's module to use. A worker that has another version of one of its
        files is replaced first.

        Raises:
            CallFailure: No worker became free in time, a deadline passed, the function cannot be loaded, or two workers
                died.
        """
        died: list[_DiedOfItError] = []
        while len(died) < _MAX_DEATHS:
            worker = await self._acquire(lane)
            while sources is not None and worker.has_other_versions(sources):
                self._in_background(self._discard(worker, reason="renewed"))
                worker = await self._acquire(lane)
            try:
                return await self._call(worker, function, call, timeout_s=timeout_s, sources=sources)
            except _DiedOfItError as error:
                self._say_once(function, error.how)
                died.append(error)
            except _FullError:
                continue
        how = ", and then ".join(dict.fromkeys(error.how for error in died))
        seconds = sum(error.seconds for error in died)
        raise CallFailure("error", f"its worker process died twice: {how}", seconds=seconds)

    def _say_once(self, function: str, how: str) -> None:
        if len(self._said) >= _MAX_SAID:
            self._said.clear()
        if (function, how) not in self._said:
            self._said.add((function, how))
            log.warning("%s %s: its worker process died: %s (logged once)", self._role, function, how)

    async def _call(
        self,
        worker: WorkerProcess[AnswerT, DescriptionT],
        function: str,
        call: bytes,
        *,
        timeout_s: float,
        sources: Sources | None,
    ) -> tuple[AnswerT, float]:
        began_at = time.monotonic()
        try:
            task = Task(function, msgspec.Raw(call), timeout_s, self._import_timeout_s)
            if sources is not None:
                task = msgspec.structs.replace(task, version=sources.key, sources=worker.give(sources))
            answer, seconds = await worker.answer(task)
        except WorkerDiedError as error:
            how = await self._discard(worker, reason="died")
            raise _DiedOfItError(error.why or how, time.monotonic() - began_at) from error
        except CallFailure as failure:
            await self._discard(worker, reason=failure.outcome)
            raise
        except BaseException:  # cancelled: the run is over, and the answer is not needed
            self._in_background(self._discard(worker, reason="cancelled"))
            raise
        if answer.is_out_of_memory:  # what fills the worker may be in the globals of its modules
            has_several = worker.has_several
            self._in_background(self._discard(worker, reason="renewed"))
            if has_several:
                raise _FullError
        else:
            self._release(worker)
        if isinstance(answer, Refused):
            raise CallFailure("error", answer.detail)
        return answer, seconds

    def renew(self) -> None:
        """Replace every worker once it is free, so that changed modules are imported again."""
        self._generation += 1
        self._discard_old()

    def forget(self, module: str) -> None:
        """Replace the workers that have a version of ``module`` in memory, once free, because it gets no more calls."""
        for worker in self._alive:
            if worker.was_given(module):
                worker.generation = _FORGOTTEN
        self._discard_old()

    def _discard_old(self) -> None:
        idle, self._idle = self._idle, deque()
        for worker in idle:
            self._release(worker)

    async def _acquire(self, lane: str) -> WorkerProcess[AnswerT, DescriptionT]:
        while self._idle:
            worker = self._idle.popleft()
            if not worker.is_gone:
                return worker
            self._in_background(self._discard(worker, reason="died"))
        waiter: asyncio.Future[WorkerProcess[AnswerT, DescriptionT]] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(lane, deque()).append(waiter)
        try:
            with self._metrics.waiting_for_worker(lane):
                return await self._given_to(waiter)
        except BaseException:
            if not waiter.cancel() and not waiter.cancelled():
                self._release(waiter.result())
            raise

    async def _given_to(
        self, waiter: "asyncio.Future[WorkerProcess[AnswerT, DescriptionT]]"
    ) -> WorkerProcess[AnswerT, DescriptionT]:
        """Wait until a worker is given to this call. Raises CallFailure if none becomes free for too long."""
        began_at = time.monotonic()
        while not waiter.done():
            left_s = max(began_at, self._freed_at) + self._queue_timeout_s - time.monotonic()
            if left_s <= 0:
                detail = (
                    f"no {self._role} worker became free within {self._queue_timeout_s:g} s; set "
                    f"HEADRACE_NUM_{self._role.upper()}_WORKERS"
                )
                raise CallFailure("overload", detail)
            await asyncio.wait([waiter], timeout=left_s)
        return waiter.result()

    def _release(self, worker: WorkerProcess[AnswerT, DescriptionT]) -> None:
        if worker.generation < self._generation:
            self._in_background(self._discard(worker, reason="renewed"))
            return
        while self._waiting:
            lane = next(iter(self._waiting))
            queue = self._waiting.pop(lane)
            waiter = queue.popleft()
            if queue:
                self._waiting[lane] = queue  # at the end, so that lanes take turns
            if not waiter.done():
                self._freed_at = time.monotonic()
                waiter.set_result(worker)
                return
        self._idle.append(worker)

    async def _discard(self, worker: WorkerProcess[AnswerT, DescriptionT], *, reason: str) -> str:
        self._alive.discard(worker)
        self._metrics.worker_replaced(reason)
        self._in_background(self._replace())
        return await worker.kill()

    async def _replace(self) -> None:
        while not self._is_closing:
            try:
                await self._start_one()
            except WorkerStartError as error:
                log.error("no new %s worker could be started (%s), trying again", self._role, error)  # noqa: TRY400
                self._give_up_if_useless(error)
                await asyncio.sleep(_RESTART_PAUSE_S)
            else:
                return

    def _give_up_if_useless(self, error: WorkerStartError) -> None:
        now = time.monotonic()
        if self._first_failure_at is None:
            self._first_failure_at, self._num_failures = now, 0
        self._num_failures += 1
        failing_s = now - self._first_failure_at
        if self.num_alive or failing_s < _GIVE_UP_AFTER_S or self._num_failures < _GIVE_UP_AFTER_FAILURES:
            return
        raise UnavailableError(f"no {self._role} worker could be started for {failing_s:.0f} s: {error}") from error

    async def _start_one(self) -> None:
        generation = self._generation
        worker = await WorkerProcess[AnswerT, DescriptionT].start(self._limits, self._kind)
        self._first_failure_at = None
        if self._is_closing:
            await worker.kill()
            return
        worker.generation = generation
        self._alive.add(worker)
        self._release(worker)

    def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work, name=f"{self._role} worker replacement")
        self._replacing.add(task)
        task.add_done_callback(self._look_at)

    def _look_at(self, task: asyncio.Task[object]) -> None:
        """Pass the exception of a background task to ``watch``, which raises it."""
        self._replacing.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None and self._failure is None:
            self._failure = failure
            self._has_failed.set()

    async def _close(self) -> None:
        self._is_closing = True
        await asyncio.gather(*(worker.kill() for worker in self._alive))
        while self._replacing:
            _, waiting = await asyncio.wait(self._replacing, timeout=_CLOSE_PATIENCE_S)
            if waiting:
                end_fork_server()  # it hangs, and the remaining tasks wait for it
        self._alive.clear()
        self._idle.clear()
