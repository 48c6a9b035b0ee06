"""Imports modules of reward functions in processes made for that, and says what their functions are.

Importing is running somebody's code: nothing of it stays in the service, or in a worker that others wait for.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from services.rewarder.fork_server import WorkerStartError
from services.rewarder.module_sources import Sources
from services.rewarder.reward_worker import Limits
from services.rewarder.worker_frames import Inspect, Inspected, Refused, Reply
from services.rewarder.worker_process import WorkerDiedError, WorkerProcess


class Inspections:
    """A bounded number of them at a time; one place is kept for those that somebody waits for.

    Args:
        limits: Of each process.
        num_at_once: At least two.
    """

    def __init__(self, limits: Limits, *, num_at_once: int) -> None:
        self._limits = limits
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
                self._background_places if in_background else contextlib.nullcontext(),
                self._places,
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
        """Ask, and once more if the process could not be started or died: it may have been somebody else's doing."""
        module = request.function.partition(":")[0]
        refused = Refused("")
        for _ in range(2):
            try:
                worker = await WorkerProcess.start(self._limits)
            except WorkerStartError as error:
                refused = Refused(f"no process could be started to import {module}: {error}; try again")
                continue
            try:
                await worker.send(request)
                return await worker.receive()
            except WorkerDiedError as error:
                refused = Refused(f"importing {module} ended its process: {error.why or await worker.kill()}")
            finally:
                await worker.kill()
        return refused
