"""Runs many simulated replicas in one process. To the rest of the system, each is a generator of its own.

    /replicas/sim-000/...  --> replica 0: lease, consumer name, streams, weight routes, OpenAI routes
    /replicas/sim-001/...  --> replica 1
    /...                   --> replica 0, so that one replica is reached like any generator

The replicas share only the process, its event loop, and the polling for the current run.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from services.generator.metrics import GeneratorMetrics
from services.generator.settings import GeneratorSettings
from services.generator.simulated.model_facts import ModelFacts, read_model_facts
from services.generator.simulated.receiving import import_transfer
from services.generator.simulated.simulated_replica import SimulatedReplica
from services.generator.simulated.simulation_settings import SimulationSettings
from shared.access.keyring import Keyring
from shared.errors import StateLostError, UserError
from shared.health_check import NO_RUN
from shared.redis.redis_connection import Redis
from shared.redis.redis_readiness import wait_until_back, wait_until_ready
from shared.redis.run_record import TERMINAL, RunRecord
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from shared.run_options.run_places import require_places
from shared.service.daemon_thread import in_thread
from shared.service.logs import about_run

log = logging.getLogger(__name__)

REPLICAS_PATH = "/replicas/"


class SimulatedFleet:
    """Serves one run after the other with all simulated replicas of this process. It is also their ASGI application.

    Args:
        settings: Settings of the process.
        simulation: Settings of the simulation.
        replicas: The replicas, at least one.
        keyring: The keys of all replicas.
        redis: Client made by redis_connection.py, to read the current run.
        metrics: Metrics of all replicas.
    """

    def __init__(
        self,
        settings: GeneratorSettings,
        simulation: SimulationSettings,
        replicas: Sequence[SimulatedReplica],
        *,
        keyring: Keyring,
        redis: Redis,
        metrics: GeneratorMetrics,
    ) -> None:
        self._settings = settings
        self._simulation = simulation
        self._replicas = replicas
        self._redis = redis
        self._metrics = metrics
        self._store = RunStore(redis)
        self._apps = {replica.name: replica.app(keyring) for replica in replicas}
        self._run_id: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the replica that its path names."""
        path = str(scope.get("path", ""))
        if not path.startswith(REPLICAS_PATH):
            await self._apps[self._replicas[0].name](scope, receive, send)
            return
        name, slash, rest = path.removeprefix(REPLICAS_PATH).partition("/")
        # An unknown name needs a key too: the first replica answers 401 or 404.
        app = self._apps.get(name, self._apps[self._replicas[0].name])
        inner = slash + rest if name in self._apps else path
        await app({**scope, "path": inner or "/", "raw_path": (inner or "/").encode()}, receive, send)

    async def run(self) -> None:
        """Serve one run after the other until cancelled.

        Raises:
            UnavailableError: Redis stayed unreachable. It may be in an ExceptionGroup.
        """
        await in_thread(lambda: import_transfer(self._simulation), name="import the transfer")
        await wait_until_ready(self._redis, timeout_s=self._settings.redis_patience_s)
        self._show_weights()
        async with contextlib.AsyncExitStack() as places:
            for replica in self._replicas:
                await replica.begin()
                await places.enter_async_context(replica.in_fleet())
            await self._follow()

    async def _follow(self) -> None:
        while True:
            self._run_id = None
            about_run("")
            record = await self._next_run()
            self._run_id = record.run_id
            about_run(record.run_id)
            log.info("serving run %s with %d simulated replicas", record.run_id, len(self._replicas))
            try:
                await self._serve(record)
            except* StateLostError:
                # the message is enough
                log.error("run %s: Redis no longer holds its streams", record.run_id)  # noqa: TRY400
                self._wait_for("the run's streams are gone from Redis")
                await wait_until_back(self._redis, timeout_s=self._settings.redis_patience_s)
                await asyncio.sleep(1)

    async def end_saying(self, reason: str) -> None:
        """Record in Redis, for each replica, why this process ends."""
        await asyncio.gather(*(replica.end_saying(reason, run_id=self._run_id) for replica in self._replicas))

    async def close(self) -> None:
        """Close the Redis connections of all replicas."""
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    async def _serve(self, record: RunRecord) -> None:
        try:
            config = record.parsed_config()
            facts = await in_thread(lambda: self._facts_for(config), name="read the model's config")
        except UserError as error:
            log.error("run %s cannot be served: %s", record.run_id, error)  # noqa: TRY400  the message is enough
            async with contextlib.AsyncExitStack() as seats:
                for replica in self._replicas:
                    await seats.enter_async_context(replica.refusing(record.run_id, str(error)))
                await self._until_over(record.run_id)
            return
        tasks = [
            asyncio.create_task(replica.serve(record.run_id, config, facts), name=f"replica {replica.name}")
            for replica in self._replicas
        ]
        tasks.append(asyncio.create_task(self._until_over(record.run_id), name=f"watch run {record.run_id}"))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            # Before Python 3.13, a TaskGroup forgets a cancellation that comes while it waits here, after an error.
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._show_weights()
        if failures := [result for result in results if isinstance(result, Exception)]:
            raise ExceptionGroup(f"run {record.run_id} cannot be served", failures)
        log.info("run %s is over", record.run_id)

    def _facts_for(self, config: RunConfig) -> ModelFacts:
        """Return the facts about a run's model.

        Raises:
            UserError: The run cannot be served.
        """
        roots = {"data": self._settings.places_of_data(), "weights": self._settings.places_of_weights()}
        require_places(config, **roots, opens_data_sets=False)
        _check_can_serve(config, self._simulation)
        return read_model_facts(config.model, revision=config.model_revision)

    async def _next_run(self) -> RunRecord:
        self._wait_for(NO_RUN)
        while True:
            run_id = await self._store.current_run()
            record = await self._store.get(run_id) if run_id is not None else None
            if record is not None and record.status not in TERMINAL:
                return record
            await asyncio.sleep(self._settings.poll_every_s)

    async def _until_over(self, run_id: str) -> None:
        while await self._store.current_run() == run_id:
            record = await self._store.get(run_id)
            if record is None or record.status in TERMINAL:
                return
            required = await self._store.required_version(run_id)
            for replica in self._replicas:
                replica.state.required_version = required
            self._show_weights()
            await asyncio.sleep(self._settings.poll_every_s)

    def _show_weights(self) -> None:
        """Export the oldest policy version of all replicas, and whether decoding is paused in any of them."""
        self._metrics.policy_version.set(
            min(replica.receiver.held_version.policy_version for replica in self._replicas)
        )
        self._metrics.decoding_is_paused.set(any(replica.receiver.decoding_is_paused for replica in self._replicas))

    def _wait_for(self, phase: str) -> None:
        for replica in self._replicas:
            replica.state.wait_for(phase)


def _check_can_serve(config: RunConfig, simulation: SimulationSettings) -> None:
    if simulation.transport == "gloo" and config.push_probe_tolerance is not None:
        raise UserError(
            "a simulated generator that receives weights (HEADRACE_SIMULATED_TRANSPORT=gloo) computes nothing with "
            "them, and would fail the probe after every push; submit the run with push_probe_tolerance: null",
            field="push_probe_tolerance",
        )
