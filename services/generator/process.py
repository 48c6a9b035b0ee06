"""Assembles a generator that runs vLLM; service_life.py runs and stops it."""

import asyncio
import logging

from services.generator.app import make_app
from services.generator.engine import engine_failure, fork_server
from services.generator.engine.adapter import remove_left_adapters
from services.generator.engine.engine import import_vllm, kill_children
from services.generator.engine.engine_check import EngineChecker, make_check_router
from services.generator.engine.vllm_environment import is_cpu_build
from services.generator.metrics import GeneratorMetrics
from services.generator.policy_api.openai_routes import OpenAiRoutes
from services.generator.receive.weight_receiver import WeightReceiver
from services.generator.receive.weight_routes import make_router
from services.generator.registration import STARTING, in_fleet
from services.generator.run_follower import RunFollower
from services.generator.service_life import serve_until, stop_on_signals
from services.generator.service_state import ServiceState
from services.generator.settings import GeneratorSettings
from services.generator.turns.turn_route import make_turn_router
from services.generator.turns.turn_sampler import TurnDesk
from shared.redis.redis_connection import Redis, connect
from shared.redis.redis_readiness import wait_until_ready
from shared.refusals import refuse
from shared.service.loop_watch import ended_if_hung
from shared.serving.http_server import HttpServer
from shared.serving.listening import listening_socket
from shared.serving.metrics_server import serving_metrics

log = logging.getLogger(__name__)


def run_process(settings: GeneratorSettings) -> int:
    """Run a generator with vLLM until a stop signal or a failure, and return the exit code: 0 or 1.

    Raises:
        UserError: A setting is wrong.
    """
    remove_left_adapters()
    try:
        return asyncio.run(_serve(settings))
    finally:
        kill_children()
        engine_failure.clear_away()


async def _serve(settings: GeneratorSettings) -> int:
    stop = stop_on_signals()
    if is_cpu_build():
        fork_server.start()
    receiver = WeightReceiver(replica_id=settings.name, weight_roots=settings.places_of_weights())
    state = ServiceState(receiver)
    openai = OpenAiRoutes(state.why_policy_closed, policy_version=lambda: receiver.held_version.policy_version)
    turns = TurnDesk(state)
    metrics = GeneratorMetrics()
    metrics.name_replica(settings.name)
    keyring = settings.keyring()
    metrics.watch_keys(keyring)
    certificate = settings.certificate()
    listener = listening_socket(settings.host, settings.port)
    url = settings.url(listener.getsockname()[1])
    log.info("generator %s listens on %s", settings.name, url)
    redis = connect(settings.redis_url.get_secret_value())
    follower = RunFollower(
        settings, redis=redis, receiver=receiver, state=state, openai=openai, turns=turns, metrics=metrics, url=url
    )
    checker = EngineChecker(
        settings.engine_args,
        timeout_s=settings.engine_check_timeout_s,
        data=settings.places_of_data(),
        weights=settings.places_of_weights(),
    )
    app = make_app(
        settings,
        keyring=keyring,
        state=state,
        openai=openai,
        weight_routes=make_router(receiver),
        turn_routes=make_turn_router(turns),
        engine_check=make_check_router(checker),
    )

    async def say_why(reason: str) -> None:
        await refuse(redis, "generator", settings.name, reason, run_id=follower.run_id)

    try:
        with (
            serving_metrics(metrics.registry, host=settings.host, port=settings.metrics_port),
            ended_if_hung(f"generator {settings.name}"),
        ):
            return await serve_until(
                stop,
                server=HttpServer(app, settings.http_limits(), certificate=certificate),
                listener=listener,
                work=_follow(settings, follower, redis, url=url),
                receivers=[receiver],
                say_why=say_why,
            )
    finally:
        listener.close()
        await redis.aclose()


async def _follow(settings: GeneratorSettings, follower: RunFollower, redis: Redis, *, url: str) -> None:
    name, patience_s = settings.name, settings.redis_patience_s
    await wait_until_ready(redis, timeout_s=patience_s)
    async with in_fleet(redis, replica_id=name, url=url, patience_s=patience_s, doing=STARTING):
        has_cuda = await import_vllm(settings.given_engine_args)
    async with in_fleet(redis, replica_id=name, url=url, patience_s=patience_s):
        await follower.run(has_cuda=has_cuda)
