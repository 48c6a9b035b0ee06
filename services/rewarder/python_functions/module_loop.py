"""An event loop in its own thread, which runs the async functions of one user module.

    service's loop --> inbox  --one wake-up for all calls in it-----> a task for each call
                   <-- outbox <--one wake-up for all answers in it--- the task's answer

A function that blocks this loop blocks no other loop. The service measures from outside how long the loop has been
blocked, and enforces the deadlines itself. module_loops.py decides when a loop is given up.
"""

import asyncio
import contextlib
import contextvars
import enum
import functools
import logging
import selectors
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

from services.rewarder.reward_answer import Answer

log = logging.getLogger(__name__)

_END_ATTEMPTS = 10
_END_S = 1.0
_STACK_FRAMES = 12
Work = Callable[[], Coroutine[Any, Any, Answer]]


class NoAnswer(enum.Enum):
    """The reasons for which a call ends without an answer."""

    LATE = "its deadline passed"
    CANCELLED = "it cancelled itself"


class _Call:
    __slots__ = ("answer", "context", "is_over", "name", "task", "work")

    def __init__(self, name: str, work: Work, answer: "asyncio.Future[Answer | NoAnswer]") -> None:
        self.name = name
        self.work = work
        self.answer = answer
        self.context = contextvars.copy_context()
        self.task: asyncio.Task[Answer] | None = None
        self.is_over = False  # True once no caller waits for the answer

    def end(self, answer: Answer | NoAnswer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class _WatchedSelector(selectors.DefaultSelector):
    """A selector that records when its event loop began the current turn of callbacks."""

    turn_began_at: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turn_began_at = None
        ready = super().select(timeout)
        self.turn_began_at = time.monotonic()
        return ready


class ModuleLoop:
    """An event loop for the async functions of one module, in a daemon thread that starts at once.

    Only the service's event loop may call its public methods, except ``adopt_thread``.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self._home = asyncio.get_running_loop()
        self._selector = _WatchedSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._inbox: deque[_Call] = deque()
        self._outbox: deque[tuple[_Call, Answer | NoAnswer]] = deque()
        self._is_woken = self._is_home_woken = False
        self._num_running = 0
        self._is_given_up = self._is_ended = False
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=f"async rewards of {module}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the loop's thread has not ended. It may be blocked."""
        return self._thread.is_alive()

    @property
    def turn_began_at(self) -> float | None:
        """When the loop began its current turn of callbacks, on the monotonic clock; None if it waits for events."""
        return self._selector.turn_began_at

    def adopt_thread(self) -> None:
        """Make ``asyncio.get_event_loop`` return this loop in the calling thread, which imports the module."""
        asyncio.set_event_loop(self._loop)

    async def run(self, name: str, work: Work, *, timeout_s: float) -> Answer | NoAnswer:
        """Run ``work`` as a task of this loop, and return its answer or a NoAnswer.

        After ``timeout_s`` seconds, the task is cancelled, and this method returns without waiting for its end.
        """
        call = _Call(name, work, self._home.create_future())
        deadline = self._home.call_later(timeout_s, call.end, NoAnswer.LATE)
        self._inbox.append(call)
        if not self._is_woken:
            self._is_woken = True
            self._home.call_soon(self._wake)  # once for all calls of this turn of the service's loop
        answer: Answer | NoAnswer = NoAnswer.LATE
        try:
            answer = await call.answer
        finally:
            deadline.cancel()
            if answer is NoAnswer.LATE:
                call.is_over = True
                self._post(call.cancel)
        return answer

    def where(self) -> str:
        """Return the place in the code where the thread is now: function, file and line; "something" if it has ended.

        This is the innermost function of the user's module, or of any module if the user's module has none running.
        """
        frame = innermost = self._frame()
        while frame is not None and frame.f_globals.get("__name__") != self.module:
            frame = frame.f_back
        frame = frame or innermost
        if frame is None:
            return "something"
        return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"

    def stack(self) -> str:
        """Return the current stack of the loop's thread, for the log."""
        return "".join(traceback.format_stack(self._frame(), limit=_STACK_FRAMES))

    def give_up(self) -> None:
        """End the thread once the loop is not blocked and its calls have ended, which may be never."""
        self._is_given_up = True
        self._post(self._end_if_given_up)

    async def close(self) -> None:
        """Cancel all tasks, repeatedly for a second, and wait up to two seconds for the thread to end."""
        self._post(self._begin_to_end)
        await asyncio.to_thread(self._thread.join, 2 * _END_S)

    def _frame(self) -> FrameType | None:
        frames = sys._current_frames()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  documented, for debugging
        return frames.get(self._thread.ident or 0)

    def _post(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(callback)

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take_in)
        except RuntimeError:  # it was closed in the same turn
            while self._inbox:
                self._inbox.popleft().end(NoAnswer.CANCELLED)

    def _give_back(self) -> None:
        self._is_home_woken = False
        while self._outbox:
            call, answer = self._outbox.popleft()
            call.end(answer)

    # All methods below run in the thread.

    def _run(self) -> None:
        while not self._is_ended:
            try:
                self._loop.run_forever()
            except BaseException as error:  # noqa: BLE001  user code: SystemExit in a task must not end the loop
                log.warning("a task of reward module %s raised %s", self.module, type(error).__name__)
        self._loop.close()

    def _take_in(self) -> None:
        self._is_woken = False
        while self._inbox:
            call = self._inbox.popleft()
            if call.is_over:
                continue
            call.task = self._loop.create_task(call.work(), name=f"reward {call.name}", context=call.context)
            self._num_running += 1
            call.task.add_done_callback(functools.partial(self._hand_back, call))
        self._end_if_given_up()

    def _hand_back(self, call: _Call, task: "asyncio.Task[Answer]") -> None:
        self._num_running -= 1
        self._end_if_given_up()
        if call.is_over:
            return
        self._outbox.append((call, NoAnswer.CANCELLED if task.cancelled() else task.result()))
        if not self._is_home_woken:
            self._is_home_woken = True
            with contextlib.suppress(RuntimeError):  # the service's loop is closed
                self._home.call_soon_threadsafe(self._give_back)

    def _end_if_given_up(self) -> None:
        if self._is_given_up and not self._num_running and not self._inbox:
            self._begin_to_end()

    def _begin_to_end(self) -> None:
        if self._ending is None or self._ending.done():
            self._ending = self._loop.create_task(self._end(), name=f"end of the loop of {self.module}")

    async def _end(self) -> None:
        for _ in range(_END_ATTEMPTS):
            others = asyncio.all_tasks() - {self._ending}
            if not others:
                break
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=_END_S / _END_ATTEMPTS)
        if asyncio.all_tasks() - {self._ending}:
            return
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()
        self._is_ended = True
        self._loop.stop()
