"""Runs all of headrace on one machine: an embedded Redis and the services, as children of this process.

    lock --> end leftovers --> redis --> trainer, rewarder, sessions, generators --> (Ctrl-C) --> end in order
                                                                         ^
                                                    SIGUSR1: the number from `headrace scale` (generator_scaling.py)

No process outlives the launcher. A child gets SIGTERM when the launcher dies, the launcher adopts every orphan, and a
new launcher first ends the processes that a killed one left behind. All state is in Redis and in the runs'
directories, so a crash of any process, the launcher included, costs work but never a run.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable

import httpx

from headrace.local import embedded_redis, process_table, redis_repair
from headrace.local.generator_scaling import GeneratorScaling
from headrace.local.launch_ports import Doors, hold_ports
from headrace.local.running_services import RunningServices
from headrace.local.service_specs import (
    REWARDER,
    SESSIONS,
    TRAINER,
    UpSettings,
    end_patience_s,
    generator_spec,
    placement,
    redis_spec,
    service_specs,
)
from headrace.local.state_dir import Endpoint, StateDir
from headrace.local.supervised_process import USER_ERROR, ServiceSpec
from shared.errors import HeadraceError
from shared.redis.redis_connection import connect
from shared.redis.redis_readiness import wait_until_ready
from shared.service.tls import PeerTls

_REDIS_START_TIMEOUT_S = 60.0
_READY_EVERY_S, _ANSWER_TIMEOUT_S = 0.1, 2.0
_SLOW_START_S = 30.0
_CHECKERS = (REWARDER, SESSIONS)
"""The services that check parts of a run when it is submitted."""
_CHECKERS_START_S = 20.0
_LEFTOVER_PATIENCE_S = 5.0
_SWEEP_PATIENCE_S = 1.0
_REAP_EVERY_S = 5.0


def run(settings: UpSettings, *, say: Callable[[str], None]) -> int:
    """Run `headrace up` until SIGINT, SIGTERM or SIGHUP, or until it cannot go on, and return the exit status.

    Raises:
        UserError: Another launcher runs on this state directory, or the directory cannot be used or repaired.
    """

    def told(line: str) -> None:
        with contextlib.suppress(OSError):  # a pipe whose reader has ended, a terminal that is gone, a full disk
            say(line)

    state = StateDir(settings.state_dir)
    state.make()
    with state.lock():
        _end_leftovers(state, told)
        if settings.repairs_redis:
            told(redis_repair.repair(state.redis))
        process_table.adopt_orphans()
        return asyncio.run(Launcher(settings, state, say=told).run())


class Launcher:
    """Starts Redis and the services of one `headrace up`, and ends them all on a signal or if it cannot go on.

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
        placement(settings, settings.num_generator_processes)  # refuses generators without GPUs
        self._ports = hold_ports(
            api_port=settings.api_port,
            metrics_port=settings.metrics_port,
            num_generators=settings.num_generator_processes,
            scheme=settings.scheme,
        )
        if self._ports.note:
            say(self._ports.note)
        self._http = httpx.AsyncClient(timeout=_ANSWER_TIMEOUT_S, **PeerTls(settings.ca_file).for_async_client())
        self._is_ready = False
        self._scaled = asyncio.Event()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        """Start all processes, wait for a signal or a fatal problem, end all processes, and return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            loop.add_signal_handler(signal.SIGHUP, self._stop.set)  # a shell sends it twice, which is no hurry
        loop.add_signal_handler(signal.SIGUSR1, self._scaled.set)
        try:
            async with self._http, asyncio.TaskGroup() as tasks:
                services = RunningServices(
                    tasks,
                    say=self._say,
                    on_start=lambda: self._write_endpoint(services),
                    on_refusal=self._on_refusal,
                    hurry=self._hurry,
                )
                starting = tasks.create_task(self._start(services), name="start the services")
                reaping = tasks.create_task(_reap_orphans(), name="reap orphans")
                await self._stop.wait()
                starting.cancel()
                await asyncio.wait({starting})
                await self._end(services)
                reaping.cancel()
        finally:
            self._sweep()
            self._ports.close()
            self._state.forget_endpoint()
        return self._exit_code

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _start(self, services: RunningServices) -> None:
        try:
            redis_url = await self._start_redis(services)
        except HeadraceError as error:
            self._give_up(str(error))
            return
        specs = service_specs(self._settings, self._state, keys=self._keys, ports=self._ports, redis_url=redis_url)
        for spec in specs:
            services.start(spec)
        await self._announce_when_ready(services)
        await self._scale_when_told(services, redis_url)

    async def _start_redis(self, services: RunningServices) -> str:
        """Start the embedded Redis unless the user named another one. Wait until Redis answers, and return its URL."""
        redis_url = self._settings.redis_url
        if redis_url is None:
            password = self._keys.redis_password
            redis_url = embedded_redis.url(self._ports.redis.number, password)
            services.start(redis_spec(self._state, port=self._ports.redis, password=password))
        self._state.write_redis_url(redis_url)
        client = connect(redis_url)
        try:
            await wait_until_ready(client, timeout_s=_REDIS_START_TIMEOUT_S)
        finally:
            await client.aclose()
        return redis_url

    def _on_refusal(self, spec: ServiceSpec, code: int) -> None:
        # During the start, a user is there to correct the settings. Later, runs wait for another process.
        is_start_refused = spec.name in _CHECKERS and code == USER_ERROR and not self._is_ready
        if spec.is_essential or is_start_refused:
            self._give_up(f"headrace cannot run without {spec.name}")
        else:
            self._say("the other services keep running; correct the problem and restart headrace")

    def _give_up(self, reason: str) -> None:
        if not self._stop.is_set():
            self._say(reason)
            self._exit_code = 1
            self._stop.set()

    async def _announce_when_ready(self, services: RunningServices) -> None:
        """Wait for the run API, then at most 20 s for rewarder and sessions service. Then print all addresses."""
        slow_at = time.monotonic() + _SLOW_START_S
        while not await self._answers(self._ports.trainer.url):
            await asyncio.sleep(_READY_EVERY_S)
            if time.monotonic() > slow_at:
                slow_at = float("inf")
                self._say(f"still waiting for the run API; its log is {self._state.logs / 'trainer.log'}")
        await self._wait_for_checkers(services)
        self._is_ready = True
        self._write_endpoint(services)
        endpoint = self._state.endpoint()
        if endpoint is not None:
            for line in announcement(self._state, endpoint, metrics_port=self._settings.metrics_port):
                self._say(line)

    async def _wait_for_checkers(self, services: RunningServices) -> None:
        """Wait until rewarder and sessions service each are ready or have crashed, for at most 20 s in all.

        Both check parts of a run when it is submitted. Crashes are reported elsewhere, by SupervisedProcess.
        """
        give_up_at = time.monotonic() + _CHECKERS_START_S
        for name, doors in ((REWARDER, self._ports.rewarder), (SESSIONS, self._ports.sessions)):
            while not await self._answers(doors.url):
                if services.has_restarted(name) or time.monotonic() > give_up_at:
                    break
                await asyncio.sleep(_READY_EVERY_S)

    async def _scale_when_told(self, services: RunningServices, redis_url: str) -> None:
        """Start or end generators each time that `headrace scale` sets a new number."""

        def spec(index: int, doors: Doors, num_generators: int) -> ServiceSpec:
            return generator_spec(
                self._settings,
                self._state,
                keys=self._keys,
                redis_url=redis_url,
                index=index,
                doors=doors,
                num_generators=num_generators,
            )

        scaling = GeneratorScaling(
            services,
            self._ports.generators,
            metrics_port=self._settings.metrics_port,
            scheme=self._settings.scheme,
            check=lambda number: placement(self._settings, number),
            make_spec=spec,
            is_ready=self._answers,
            say=self._say,
        )
        while True:
            await self._scaled.wait()
            self._scaled.clear()
            wanted = self._state.wanted_generators()
            if wanted is None or wanted < 1 or self._settings.num_simulated:
                continue
            specs = await scaling.scale(wanted)
            if specs is not None:
                self._write_endpoint(services)
                await scaling.place(specs, is_outdated=self._scaled.is_set)

    async def _answers(self, url: str) -> bool:
        """Return whether the service at this URL is ready, according to its /readyz."""
        try:
            return (await self._http.get(f"{url}/readyz")).is_success
        except httpx.HTTPError:
            return False

    def _write_endpoint(self, services: RunningServices) -> None:
        launcher = process_table.mark(os.getpid())
        if launcher is None:
            return
        endpoint = Endpoint(
            api_url=self._ports.trainer.url,
            rewarder_url=self._ports.rewarder.url,
            sessions_url=self._ports.sessions.url,
            generator_urls=tuple(doors.url for doors in self._ports.generators),
            ca_file=self._settings.ca_file,
            num_simulated=self._settings.num_simulated,
            launcher=launcher,
            processes=services.processes(),
            is_ready=self._is_ready,
            end_patience_s=end_patience_s(),
        )
        try:
            self._state.write_endpoint(endpoint)
        except OSError as error:  # the services go on; commands find them by the file as it is
            self._say(f"{self._state.endpoint_file} cannot be written: {error.strerror}")

    async def _end(self, services: RunningServices) -> None:
        self._say("stopping; press Ctrl-C again to kill")
        await services.end_all()

    def _sweep(self) -> None:
        """End the processes that services started and left behind."""
        left = process_table.descendants(os.getpid())
        process_table.end(left, patience_s=_SWEEP_PATIENCE_S)


async def _reap_orphans() -> None:
    reaper = process_table.OrphanReaper()
    while True:
        await asyncio.sleep(_REAP_EVERY_S)
        with contextlib.suppress(OSError):  # no descriptors are left: the next look may have some
            reaper.look()


def announcement(state: StateDir, endpoint: Endpoint, *, metrics_port: int) -> list[str]:
    """Return the lines that show the user the addresses, the key and the logs once `headrace up` is ready."""
    served = (TRAINER, REWARDER, SESSIONS, *("generator" for _ in endpoint.generator_urls)) if metrics_port else ()
    return [
        "headrace is up.",
        f"  runs        {endpoint.api_url}/v1/runs",
        f"  rewards     {endpoint.rewarder_url}/v1/rewards",
        *([f"  sessions    {endpoint.sessions_url}/v1/sessions"] if endpoint.sessions_url else []),
        *(f"  generator   {url}/v1/completions" for url in endpoint.generator_urls),
        *(f"  metrics     http://127.0.0.1:{port}/metrics ({name})" for port, name in enumerate(served, metrics_port)),
        *([f"  SIMULATED   {endpoint.simulated_note()}"] if endpoint.num_simulated else []),
        f"  key         {state.api_key_file} (the commands below find it by themselves)",
        f"  logs        {state.logs}",
        "Next: headrace submit FILE --watch    headrace runs    headrace watch    headrace stop",
    ]


def _end_leftovers(state: StateDir, say: Callable[[str], None]) -> None:
    """End the services that a killed launcher left behind. This process has the lock, so no other launcher runs."""
    endpoint = state.endpoint()
    if endpoint is None:
        return
    left = [process for process in endpoint.processes.values() if process_table.is_alive(process)]
    if left:
        say(f"ending {len(left)} processes that an earlier launcher left behind")
        process_table.end(left, patience_s=_LEFTOVER_PATIENCE_S)
    state.forget_endpoint()
