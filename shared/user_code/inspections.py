"""Imports users' modules in separate processes, and describes their functions.

Importing a module runs the user's code, so each import has a new process that ends afterwards. Nothing of the module
stays in the service or in a worker that other calls wait for.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Generic

from shared.user_code.fork_server import WorkerStartError
from shared.user_code.limits import Limits
from shared.user_code.module_sources import Sources
from shared.user_code.task_kind import AnswerT, DescriptionT, TaskKind
from shared.user_code.worker_frames import Inspect, Refused, Reply
from shared.user_code.worker_process import WorkerDiedError, WorkerProcess


class Inspections(Generic[AnswerT, DescriptionT]):
    """Runs a limited number of inspections at a time. Background inspections leave one place free for the others.

    Args:
        limits: The limits of each process.
        kind: Describes the functions.
        num_at_once: Most inspections at a time, at least two.
    """

    def __init__(self, limits: Limits, kind: TaskKind[AnswerT, DescriptionT], *, num_at_once: int) -> None:
        self._limits = limits
        self._kind = kind
        self._places = asyncio.Semaphore(num_at_once)
        self._background_places = asyncio.Semaphore(num_at_once - 1)

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
        is_begun = False
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._background_places if in_background else contextlib.nullcontext(),
                self._places,
            ):
                is_begun = True
                reply = await self._ask_new_process(Inspect(function, dict(kwargs or {}), sources), step)
        except TimeoutError:
            if not is_begun:
                return Refused(f"{module} had to wait for {shown_s} s until other modules were imported; try again")
            return Refused(f"{step} took longer than {shown_s} s")
        if not isinstance(reply, (self._kind.description_type, Refused)):
            return Refused(f"the {self._kind.places.role} worker sent an unexpected {type(reply).__name__}")
        return reply

    async def _ask_new_process(self, request: Inspect, step: str) -> Reply | AnswerT | DescriptionT:
        """Send the request to a new process. Try a second time if the process does not start or dies.

        The first failure may have another cause than the module.
        """
        module = request.function.partition(":")[0]
        refused = Refused("")
        for _ in range(2):
            try:
                worker = await WorkerProcess[AnswerT, DescriptionT].start(self._limits, self._kind)
            except WorkerStartError as error:
                refused = Refused(f"no process could be started to import {module}: {error}; try again")
                continue
            try:
                await worker.send(request)
                return await worker.receive()
            except WorkerDiedError as error:
                refused = Refused(f"{step} ended its process: {error.why or await worker.kill()}")
            finally:
                await worker.kill()
        return refused
