"""Keeps one asyncio task in a service for each run that it serves."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from shared.redis.run_record import RunRecord
from shared.service.logs import about

log = logging.getLogger(__name__)


class ServedRuns:
    """The tasks of one service, one for each served run.

    Args:
        serve: Serves a run until cancelled. ``follow`` calls it again if it has returned by itself.
        name: Name of the tasks, before the run's id.
    """

    def __init__(self, serve: Callable[[RunRecord], Coroutine[Any, Any, None]], *, name: str) -> None:
        self._serve = serve
        self._name = name
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def follow(self, served: Sequence[RunRecord]) -> None:
        """Start a task for each new run in ``served``, and cancel the tasks of all other runs.

        A task that has ended by itself is started again. If it failed, its exception is raised.
        """
        for run_id in [run_id for run_id, task in self._tasks.items() if task.done()]:
            self._tasks.pop(run_id).result()
        for run_id in self._tasks.keys() - {record.run_id for record in served}:
            log.info("run %s is over", run_id, extra={"run_id": run_id})
            await _cancel(self._tasks.pop(run_id))
        for record in served:
            if record.run_id not in self._tasks:
                self._tasks[record.run_id] = asyncio.create_task(
                    self._about(record), name=f"{self._name} {record.run_id}"
                )

    async def wait(self, *, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds for the tasks to end by themselves."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=timeout_s)

    async def cancel(self) -> None:
        """Cancel all tasks, and wait for their end."""
        await _cancel(*self._tasks.values())

    async def _about(self, record: RunRecord) -> None:
        with about(run_id=record.run_id):
            await self._serve(record)


async def _cancel(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
