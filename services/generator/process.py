"""The life of the generator process, from its first byte on the wire to its exit code.

Asked to stop (SIGTERM, SIGINT) it takes no more prompts, aborts what is in flight, gives its lease back, and is gone
within ten seconds. What was in flight stays pending in Redis under its name, for its next life or for another replica.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator
from typing import cast

from services.generator import engine_failure
from services.generator.app import HttpServer, make_app
from services.generator.engine import import_vllm, kill_children
from services.generator.metrics import GeneratorMetrics
from services.generator.openai_routes import OpenAiRoutes
from services.generator.run_follower import RunFollower
from services.generator.service_state import ServiceState
from services.generator.settings import GeneratorSettings
from services.generator.weight_receiver import WeightReceiver
from services.generator.weight_routes import make_router
from shared.errors import HeadraceError, UserError
from shared.redis_connection import Redis, connect, wait_until_ready
from shared.refusals import refuse

log = logging.getLogger(__name__)

_STOP_S = 8.0


def run_process(settings: GeneratorSettings) -> int:
    """Serve until asked to stop, and return the exit code.

    Raises:
        UserError: Something is set wrong.
    """
    try:
        return asyncio.run(_serve(settings))
    finally:
        kill_children()
        engine_failure.clear_away()


async def _serve(settings: GeneratorSettings) -> int:
    stop = _stop_on_signals()
    receiver = WeightReceiver(replica_id=settings.name)
    state = ServiceState(receiver)
    openai = OpenAiRoutes(state.why_policy_closed)
    metrics = GeneratorMetrics()
    if settings.metrics_port:
        metrics.serve(host=settings.host, port=settings.metrics_port)
    server = HttpServer(settings)
    url = settings.advertise_url or f"http://{settings.host}:{server.port}"
    log.info("generator %s listens on %s", settings.name, url)
    redis = connect(settings.redis_url.get_secret_value())
    follower = RunFollower(
        settings, redis=redis, receiver=receiver, state=state, openai=openai, metrics=metrics, url=url
    )
    app = make_app(settings, state=state, openai=openai, weight_routes=make_router(receiver))

    http = asyncio.create_task(server.answer(app), name="http server")
    work = asyncio.create_task(_follow(settings, follower, redis), name="run follower")
    alarm = asyncio.create_task(receiver.fatal.wait(), name="weight alarm")
    asked = asyncio.create_task(stop.wait(), name="stop signal")
    await asyncio.wait({http, work, alarm, asked}, return_when=asyncio.FIRST_COMPLETED)

    failure = _failure_of(work) or _failure_of(http)
    if failure is None and alarm.done():
        failure = HeadraceError(receiver.fatal_reason)
    server.should_exit = True
    for task in (work, alarm, asked):
        task.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_S):
            await asyncio.gather(http, work, alarm, asked, return_exceptions=True)
    if failure is not None:
        await refuse(redis, "generator", settings.name, f"it ended, saying: {_reason(failure)}", run_id=follower.run_id)
    await redis.aclose()
    return _exit_code(failure)


async def _follow(settings: GeneratorSettings, follower: RunFollower, redis: Redis) -> None:
    has_cuda = await import_vllm(settings.engine_args)
    await wait_until_ready(redis, timeout_s=settings.redis_patience_s)
    await follower.run(has_cuda=has_cuda)


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def _failure_of(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _exit_code(failure: BaseException | None) -> int:
    if failure is None:
        return 0
    expected = [error for error in _leaves(failure) if isinstance(error, HeadraceError)]
    for error in expected:
        if isinstance(error, UserError):
            raise error
    if expected:
        log.error("%s", expected[0])
    else:
        log.error("the generator failed in a way nobody foresaw", exc_info=failure)
    return 1


def _reason(failure: BaseException) -> str:
    """Return what people are told: our sentence if there is one, a setting that is wrong before anything else."""
    known = [error for error in _leaves(failure) if isinstance(error, HeadraceError)]
    known.sort(key=lambda error: not isinstance(error, UserError))
    if known:
        return str(known[0])
    unknown = next(_leaves(failure))
    return f"{type(unknown).__name__}: {unknown}; its log says more"


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _leaves(inner)
    else:
        yield error
