"""Assembles a process of simulated replicas; service_life.py runs and stops it."""

import asyncio
import logging

from services.generator.metrics import GeneratorMetrics
from services.generator.service_life import serve_until, stop_on_signals
from services.generator.settings import GeneratorSettings
from services.generator.simulated.fleet import REPLICAS_PATH, SimulatedFleet
from services.generator.simulated.simulated_replica import SimulatedReplica
from services.generator.simulated.simulation_settings import SimulationSettings
from shared.redis.redis_connection import connect
from shared.service.loop_watch import ended_if_hung
from shared.serving.http_server import HttpServer
from shared.serving.listening import listening_socket
from shared.serving.metrics_server import serving_metrics

log = logging.getLogger(__name__)


def run_process(settings: GeneratorSettings, simulation: SimulationSettings, *, num_replicas: int) -> int:
    """Run simulated replicas in this process until a stop signal or a failure, and return the exit code: 0 or 1.

    Raises:
        UserError: A setting is wrong.
    """
    return asyncio.run(_serve(settings, simulation, num_replicas=num_replicas))


def replica_names(name: str, num_replicas: int) -> list[str]:
    """Return the stable names of the replicas, such as ``NAME-000``. A single replica has the name of the process."""
    return [name] if num_replicas == 1 else [f"{name}-{index:03d}" for index in range(num_replicas)]


async def _serve(settings: GeneratorSettings, simulation: SimulationSettings, *, num_replicas: int) -> int:
    stop = stop_on_signals()
    metrics = GeneratorMetrics()
    metrics.name_replica(settings.name)
    keyring = settings.keyring()
    metrics.watch_keys(keyring)
    certificate = settings.certificate()
    listener = listening_socket(settings.host, settings.port)
    base_url = settings.url(listener.getsockname()[1])
    replicas = [
        SimulatedReplica(
            settings,
            simulation,
            name=name,
            index=index,
            url=base_url if num_replicas == 1 else f"{base_url}{REPLICAS_PATH}{name}",
            metrics=metrics,
        )
        for index, name in enumerate(replica_names(settings.name, num_replicas))
    ]
    redis = connect(settings.redis_url.get_secret_value())
    fleet = SimulatedFleet(settings, simulation, replicas, keyring=keyring, redis=redis, metrics=metrics)
    log.warning("%d SIMULATED generators listen on %s: tokens are random", num_replicas, base_url)
    try:
        receivers = [replica.receiver for replica in replicas]
        with (
            serving_metrics(metrics.registry, host=settings.host, port=settings.metrics_port),
            ended_if_hung("the simulated generator"),
        ):
            return await serve_until(
                stop,
                server=HttpServer(fleet, settings.http_limits(), certificate=certificate),
                listener=listener,
                work=fleet.run(),
                receivers=receivers,
                say_why=fleet.end_saying,
            )
    finally:
        listener.close()
        await fleet.close()
        await redis.aclose()
