"""Starts, replaces and ends the services of one `headrace up`, and keeps each of them alive.

start --> supervised --> end, or replace
                    +--> refuses to run: reported with its exit code, and no longer started
"""

import asyncio
from collections.abc import Callable, Collection

from headrace.local.service_specs import REDIS, TRAINER
from headrace.local.state_dir import ProcessMark
from headrace.local.supervised_process import ServiceSpec, SupervisedProcess


class RunningServices:
    """The services of one `headrace up`, in the order in which they were started.

    Args:
        tasks: Runs a supervising task for each service.
        say: Prints a line for the user.
        on_start: Called after each start of a process.
        on_refusal: Called with a service that refused to run, and its exit code.
        hurry: Once it is set, services that are ending are killed.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        *,
        say: Callable[[str], None],
        on_start: Callable[[], None],
        on_refusal: Callable[[ServiceSpec, int], None],
        hurry: asyncio.Event,
    ) -> None:
        self._tasks = tasks
        self._say = say
        self._on_start = on_start
        self._on_refusal = on_refusal
        self._running: list[SupervisedProcess] = []
        self._hurry = hurry

    def start(self, spec: ServiceSpec) -> None:
        """Start a service, and keep it alive until it is ended."""
        service = SupervisedProcess(spec, say=self._say, on_start=self._on_start)
        self._running.append(service)
        self._tasks.create_task(self._keep_alive(service), name=f"keep {spec.name} alive")

    async def end(self, names: Collection[str]) -> None:
        """End the services with these names at the same time, and forget them."""
        ending = [service for service in self._running if service.spec.name in names]
        await asyncio.gather(*(self._end_one(service) for service in ending))
        self._running = [service for service in self._running if service not in ending]

    async def replace(self, spec: ServiceSpec) -> None:
        """End the service of this name, and start it with this spec."""
        await self.end({spec.name})
        self.start(spec)

    async def end_all(self) -> None:
        """End the trainer first, which needs the other services to save its state; then the others, and Redis last."""
        for service in self._running:
            service.start_no_more()
        between = {name for name in self.specs() if name not in (TRAINER, REDIS)}
        for names in ({TRAINER}, between, {REDIS}):
            await asyncio.gather(*(self._end_one(one) for one in self._running if one.spec.name in names))

    def specs(self) -> dict[str, ServiceSpec]:
        """Return each service's spec (command, environment, ports), by name, without services that were ended."""
        return {service.spec.name: service.spec for service in self._running}

    def processes(self) -> dict[str, ProcessMark]:
        """Return the processes that were started, by the names of their services."""
        return {service.spec.name: service.process for service in self._running if service.process is not None}

    def has_restarted(self, name: str) -> bool:
        """Return whether a service has crashed and was started again."""
        (service,) = (service for service in self._running if service.spec.name == name)
        return service.num_starts > 1

    async def _keep_alive(self, service: SupervisedProcess) -> None:
        code = await service.keep_alive()
        if code is not None:
            self._on_refusal(service.spec, code)

    async def _end_one(self, service: SupervisedProcess) -> None:
        if not await service.end(hurry=self._hurry):
            self._say(f"{service.spec.name} did not end in time and was killed")
