"""Runs all of headrace on one machine: an embedded Redis and the services, as children of this process.

    lock --> end leftovers --> redis --> trainer, rewarder, generators --> (Ctrl-C) --> end in order --> none left
                                                               ^
                                          SIGUSR1: the number from `headrace scale`

No process outlives the launcher. A child gets SIGTERM when the launcher dies, the launcher adopts every orphan, and a
new launcher first ends the processes that a killed one left behind. All state is in Redis and in the runs'
directories, so a crash of any process, the launcher included, costs work but never a run.
"""

import asyncio
import functools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx

from headrace.local import embedded_redis, process_table, redis_repair
from headrace.local.launch_ports import hold_generators, hold_ports
from headrace.local.rearrangement import rearrange
from headrace.local.service_specs import (
    REDIS,
    REWARDER,
    TRAINER,
    UpSettings,
    generator_spec,
    redis_spec,
    service_specs,
)
from headrace.local.state_dir import Endpoint, StateDir
from headrace.local.supervised_process import USER_ERROR, ServiceSpec, SupervisedProcess
from shared.errors import HeadraceError, UserError
from shared.redis.redis_connection import connect, wait_until_ready
from shared.service.tls import PeerTls

_REDIS_START_TIMEOUT_S = 60.0
_READY_EVERY_S = 0.1
_SLOW_START_S = 30.0
_REWARDER_START_S = 20.0
_LEFTOVER_PATIENCE_S = 5.0
_SWEEP_PATIENCE_S = 1.0


def run(settings: UpSettings, *, say: Callable[[str], None]) -> int:
    """Run until SIGINT or SIGTERM, and return the exit status.

    Raises:
        UserError: Another launcher runs on this state directory, or the directory cannot be used or repaired.
    """
    state = StateDir(settings.state_dir)
    state.make()
    with state.lock():
        _end_leftovers(state, say)
        if settings.repairs_redis:
            say(redis_repair.repair(state.redis))
        process_table.adopt_orphans()
        return asyncio.run(Launcher(settings, state, say=say).run())


class Launcher:
    """Starts, supervises, scales and ends the processes of one launch.

    Args:
        settings: The options of `headrace up`.
        state: The state directory, already locked.
        say: Prints a line for the user.
    """

    def __init__(self, settings: UpSettings, state: StateDir, *, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._state = state
        self._say = say
        self._keys = state.keys()
        self._ports = hold_ports(
            api_port=settings.api_port,
            metrics_port=settings.metrics_port,
            num_generators=settings.num_generator_processes,
            scheme=settings.scheme,
        )
        self._tls = PeerTls(settings.ca_file)
        self._running: list[SupervisedProcess] = []
        self._is_ready = False
        self._scaled = asyncio.Event()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        """Start everything, wait for a reason to stop, end everything."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGUSR1, self._scaled.set)
        try:
            async with asyncio.TaskGroup() as tasks:
                starting = tasks.create_task(self._start(tasks), name="start the services")
                await self._stop.wait()
                starting.cancel()
                await asyncio.wait({starting})
                await self._end()
        finally:
            self._sweep()
            self._ports.close()
            self._state.forget_endpoint()
        return self._exit_code

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        try:
            redis_url = await self._start_redis(tasks)
        except HeadraceError as error:
            self._give_up(str(error))
            return
        specs = service_specs(self._settings, self._state, keys=self._keys, ports=self._ports, redis_url=redis_url)
        for spec in specs:
            self._supervise(spec, tasks)
        await self._announce_when_ready()
        await self._scale_when_told(redis_url, tasks)

    async def _start_redis(self, tasks: asyncio.TaskGroup) -> str:
        """Return the URL of a Redis that answers: the user's own, or the embedded one."""
        redis_url = self._settings.redis_url
        if redis_url is None:
            password = self._keys.redis_password
            redis_url = embedded_redis.url(self._ports.redis.number, password)
            self._supervise(redis_spec(self._state, port=self._ports.redis, password=password), tasks)
        self._state.write_redis_url(redis_url)
        client = connect(redis_url)
        try:
            await wait_until_ready(client, timeout_s=_REDIS_START_TIMEOUT_S)
        finally:
            await client.aclose()
        return redis_url

    def _supervise(self, spec: ServiceSpec, tasks: asyncio.TaskGroup) -> None:
        service = SupervisedProcess(spec, say=self._say, on_start=self._write_endpoint)
        self._running.append(service)
        tasks.create_task(self._keep_alive(service), name=f"keep {spec.name} alive")

    async def _keep_alive(self, service: SupervisedProcess) -> None:
        code = await service.keep_alive()
        if code is None:
            return
        # During the start, a user is there to correct the rewarder's settings. Later, runs wait for another rewarder.
        is_start_refused = service.spec.name == REWARDER and code == USER_ERROR and not self._is_ready
        if service.spec.is_essential or is_start_refused:
            self._give_up(f"headrace cannot run without {service.spec.name}")
        else:
            self._say("the other services keep running; correct the problem and restart headrace")

    def _give_up(self, reason: str) -> None:
        if not self._stop.is_set():
            self._say(reason)
            self._exit_code = 1
            self._stop.set()

    async def _announce_when_ready(self) -> None:
        """Wait for the run API, and a limited time for the rewarder, which a submit needs; then print all addresses."""
        slow_at = time.monotonic() + _SLOW_START_S
        async with self._asking(self._ports.trainer.url) as client:
            while not await _answers(client):
                await asyncio.sleep(_READY_EVERY_S)
                if time.monotonic() > slow_at:
                    slow_at = float("inf")
                    self._say(f"still waiting for the run API; its log is {self._state.logs / 'trainer.log'}")
        await self._wait_for_rewarder()
        self._is_ready = True
        self._write_endpoint()
        endpoint = self._state.endpoint()
        if endpoint is not None:
            for line in announcement(self._state, endpoint, metrics_port=self._settings.metrics_port):
                self._say(line)

    async def _scale_when_told(self, redis_url: str, tasks: asyncio.TaskGroup) -> None:
        """Start or end generators each time that `headrace scale` sets a new number."""
        while True:
            await self._scaled.wait()
            self._scaled.clear()
            wanted = self._state.wanted_generators()
            if wanted is None or wanted < 1 or self._settings.num_simulated:
                continue
            doors = self._ports.generators
            try:
                more = hold_generators(
                    range(len(doors), wanted),
                    metrics_port=self._settings.metrics_port,
                    scheme=self._settings.scheme,
                )
            except (UserError, OSError) as error:
                self._say(f"generators: {len(doors)}, as before: {error}")
                continue
            self._say(f"generators: {len(doors)} -> {wanted}")
            names = {f"generator-{index}" for index in range(wanted, len(doors))}
            leaving = [service for service in self._running if service.spec.name in names]
            num_staying = min(wanted, len(doors))
            closing = doors[wanted:]
            doors[wanted:] = more
            specs = [
                generator_spec(
                    self._settings,
                    self._state,
                    keys=self._keys,
                    redis_url=redis_url,
                    index=index,
                    doors=one,
                    num_generators=wanted,
                )
                for index, one in enumerate(doors)
            ]
            for spec in specs[num_staying:]:
                self._supervise(spec, tasks)
            await asyncio.gather(*(self._end_one(service) for service in leaving))
            for one in closing:
                one.close()
            self._running = [service for service in self._running if service not in leaving]
            self._write_endpoint()
            await self._place(specs, tasks)

    async def _place(self, specs: Sequence[ServiceSpec], tasks: asyncio.TaskGroup) -> None:
        """Restart the generators whose cores have changed with the number of generators."""
        async with self._asking() as client:
            places = [
                _Place(spec, doors.url, client, functools.partial(self._replace, spec, tasks))
                for spec, doors in zip(specs, self._ports.generators, strict=True)
            ]
            now = {service.spec.name: service.spec for service in self._running}
            moving = [place for place in places if now.get(place.spec.name) != place.spec]
            if moving:
                self._say(f"moving {', '.join(place.spec.name for place in moving)} to other cores, one after another")
            others = [place for place in places if place not in moving]
            await rearrange(moving, others=others, is_outdated=self._scaled.is_set)

    async def _replace(self, spec: ServiceSpec, tasks: asyncio.TaskGroup) -> None:
        (old,) = (service for service in self._running if service.spec.name == spec.name)
        await self._end_one(old)
        self._running.remove(old)
        self._supervise(spec, tasks)

    async def _wait_for_rewarder(self) -> None:
        """Wait until the rewarder answers, crashes, or its time is up. Its SupervisedProcess reports a crash."""
        give_up_at = time.monotonic() + _REWARDER_START_S
        (rewarder,) = (service for service in self._running if service.spec.name == REWARDER)
        async with self._asking(self._ports.rewarder.url) as client:
            while not await _answers(client):
                if rewarder.num_starts > 1 or time.monotonic() > give_up_at:
                    return
                await asyncio.sleep(_READY_EVERY_S)

    def _asking(self, base_url: str = "") -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=base_url, timeout=2.0, **self._tls.for_async_client())

    def _write_endpoint(self) -> None:
        launcher = process_table.mark(os.getpid())
        if launcher is None:
            return
        processes = {service.spec.name: service.process for service in self._running}
        self._state.write_endpoint(
            Endpoint(
                api_url=self._ports.trainer.url,
                rewarder_url=self._ports.rewarder.url,
                generator_urls=tuple(doors.url for doors in self._ports.generators),
                ca_file=self._settings.ca_file,
                num_simulated=self._settings.num_simulated,
                launcher=launcher,
                processes={name: process for name, process in processes.items() if process is not None},
                is_ready=self._is_ready,
            )
        )

    async def _end(self) -> None:
        """End the trainer first, which needs the other services to save its state; then the others, and Redis last."""
        self._say("stopping; press Ctrl-C again to kill")
        for service in self._running:
            service.start_no_more()
        first, last = (TRAINER,), (REDIS,)
        between = tuple(s.spec.name for s in self._running if s.spec.name not in (TRAINER, REDIS))
        for names in (first, between, last):
            await asyncio.gather(*(self._end_one(s) for s in self._running if s.spec.name in names))

    async def _end_one(self, service: SupervisedProcess) -> None:
        if not await service.end(hurry=self._hurry):
            self._say(f"{service.spec.name} did not end in time and was killed")

    def _sweep(self) -> None:
        """End the processes that services left behind."""
        left = process_table.descendants(os.getpid())
        process_table.end(left, patience_s=_SWEEP_PATIENCE_S)


@dataclass(frozen=True)
class _Place:
    """A generator and its new cores; see rearrangement.Movable."""

    spec: ServiceSpec
    url: str
    client: httpx.AsyncClient
    restart: Callable[[], Awaitable[None]]

    async def is_ready(self) -> bool:
        """Return whether the generator serves the run."""
        return await _answers(self.client, self.url)

    async def move(self) -> None:
        """Restart the generator on its new cores."""
        await self.restart()


def announcement(state: StateDir, endpoint: Endpoint, *, metrics_port: int) -> list[str]:
    """Return the lines that tell the user, once the API answers, where everything is."""
    served = (TRAINER, REWARDER, *("generator" for _ in endpoint.generator_urls)) if metrics_port else ()
    return [
        "headrace is up.",
        f"  runs        {endpoint.api_url}/v1/runs",
        f"  rewards     {endpoint.rewarder_url}/v1/rewards",
        *(f"  generator   {url}/v1/completions" for url in endpoint.generator_urls),
        *(f"  metrics     http://127.0.0.1:{port}/metrics ({name})" for port, name in enumerate(served, metrics_port)),
        *([f"  SIMULATED   {endpoint.simulated_note()}"] if endpoint.num_simulated else []),
        f"  key         {state.api_key_file} (the commands below find it by themselves)",
        f"  logs        {state.logs}",
        "Next: headrace submit FILE --watch    headrace runs    headrace watch    headrace stop",
    ]


async def _answers(client: httpx.AsyncClient, url: str = "") -> bool:
    try:
        return (await client.get(f"{url}/readyz")).is_success
    except httpx.HTTPError:
        return False


def _end_leftovers(state: StateDir, say: Callable[[str], None]) -> None:
    """End the services of a launcher that was killed. Since this process has the lock, that launcher is gone."""
    endpoint = state.endpoint()
    if endpoint is None:
        return
    left = [process for process in endpoint.processes.values() if process_table.is_alive(process)]
    if left:
        say(f"ending {len(left)} processes that an earlier launcher left behind")
        process_table.end(left, patience_s=_LEFTOVER_PATIENCE_S)
    state.forget_endpoint()
