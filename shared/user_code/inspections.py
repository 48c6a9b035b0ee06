"""Imports users' modules in separate processes, and describes their functions.

    f, g of one module: asked together --> waiting for a place --> one process imports the module, describes f, then g

Importing a module runs the user's code, so each import has a new process that ends afterwards. Nothing of the module
stays in the service or in a worker that other calls wait for. An import may take seconds, so inspections of a module's
functions share one import until it begins.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Generic

from shared.user_code.fork_server import WorkerStartError
from shared.user_code.limits import Limits
from shared.user_code.module_sources import Sources
from shared.user_code.task_kind import AnswerT, DescriptionT, TaskKind
from shared.user_code.worker_frames import Inspect, Refused
from shared.user_code.worker_process import WorkerDiedError, WorkerProcess


class _Import(Generic[DescriptionT]):
    """One process that imports a module, and the requests that it answers, in this order."""

    def __init__(self, key: tuple[object, ...]) -> None:
        self.key = key
        self.requests: list[Inspect] = []
        self.answers: list[DescriptionT | Refused] = []
        self.num_waiting = 0
        self.is_begun = False


class Inspections(Generic[AnswerT, DescriptionT]):
    """Runs a limited number of inspections at a time. Background inspections leave one place free for the others.

    Args:
        limits: The limits of each process.
        kind: The kind of function, such as reward functions; it says how they are loaded and described.
        num_at_once: Most inspections at a time, at least two.
    """

    def __init__(self, limits: Limits, kind: TaskKind[AnswerT, DescriptionT], *, num_at_once: int) -> None:
        self._limits = limits
        self._kind = kind
        self._places = asyncio.Semaphore(num_at_once)
        self._background_places = asyncio.Semaphore(num_at_once - 1)
        self._not_begun: dict[tuple[object, ...], tuple[_Import[DescriptionT], asyncio.Task[Refused]]] = {}

    async def inspect(
        self,
        function: str,
        *,
        timeout_s: float,
        sources: Sources | None = None,
        kwargs: Mapping[str, Any] | None = None,
        in_background: bool = False,
        step: str = "",
    ) -> DescriptionT | Refused:
        """Import the function's module in a new process and describe the function, or return why it is refused.

        Args:
            function: The function's name.
            timeout_s: Limit for everything together, in seconds: the wait for a place, the process and the import.
            sources: The version of the module; the current files if left out.
            kwargs: Keyword arguments to check.
            in_background: Whether no caller waits for the result. One place is kept free for other inspections.
            step: What the process does, for messages; "importing" and the module if left out.
        """
        module = function.partition(":")[0]
        step = step or f"importing {module}"
        shown_s = f"{round(timeout_s, 1):g}"
        key = (module, "" if sources is None else sources.key, in_background, step)
        if key not in self._not_begun:
            begun = _Import[DescriptionT](key)
            self._not_begun[key] = begun, asyncio.create_task(self._import(begun, step, in_background), name=step)
        shared, importing = self._not_begun[key]
        number = len(shared.requests)
        shared.requests.append(Inspect(function, dict(kwargs or {}), sources))
        shared.num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                refused = await asyncio.shield(importing)
        except TimeoutError:
            refused = Refused(f"{step} took longer than {shown_s} s")
            if not shared.is_begun:
                refused = Refused(f"{module} had to wait for {shown_s} s until other modules were imported; try again")
        finally:
            shared.num_waiting -= 1
            if not shared.num_waiting:
                self._close(shared)
                importing.cancel()
                await asyncio.wait({importing})
        return shared.answers[number] if number < len(shared.answers) else refused

    async def _import(self, shared: _Import[DescriptionT], step: str, in_background: bool) -> Refused:
        """Import the module in a new process and collect the answers; return the refusal of unanswered requests."""
        async with self._background_places if in_background else contextlib.nullcontext(), self._places:
            self._close(shared)
            shared.is_begun = True
            return await self._ask_new_process(shared.requests, step, shared.answers)

    def _close(self, shared: _Import[DescriptionT]) -> None:
        """Stop sharing this import with later inspections, because they must see later edits of the files."""
        if shared.key in self._not_begun and self._not_begun[shared.key][0] is shared:
            del self._not_begun[shared.key]

    async def _ask_new_process(
        self, requests: Sequence[Inspect], step: str, answers: list[DescriptionT | Refused]
    ) -> Refused:
        """Send the requests to a new process, collect the answers, and return the refusal of unanswered requests.

        Try a second time if the process does not start or dies: the first failure may have another cause than the
        module.
        """
        module = requests[0].function.partition(":")[0]
        refused = Refused("")
        for _ in range(2):
            answers.clear()  # so that all answers are of one version of the module
            try:
                worker = await WorkerProcess[AnswerT, DescriptionT].start(self._limits, self._kind)
            except WorkerStartError as error:
                refused = Refused(f"no process could be started to import {module}: {error}; try again")
                continue
            try:
                for request in requests:
                    await worker.send(request)
                    reply = await worker.receive()
                    if not isinstance(reply, (self._kind.description_type, Refused)):
                        return Refused(f"the {self._kind.places.role} worker sent an unexpected {type(reply).__name__}")
                    answers.append(reply)
            except WorkerDiedError as error:
                refused = Refused(f"{step} ended its process: {error.why or await worker.kill()}")
            else:
                return refused
            finally:
                await worker.kill()
        return refused
