"""Runs the process of a service that works beside its HTTP server: the rewarder and the sessions service.

variables --> settings, secrets hidden, logs --> HTTP answers at once, work beside it
SIGTERM, or the end of either --> both end --> exit code
"""

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, TypeVar, cast

from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from shared.errors import HeadraceError, UserError
from shared.redis.redis_connection import Redis
from shared.refusals import refuse
from shared.service.child_secrets import close_to_others, hide_secrets
from shared.service.logs import configure_first_logging, configure_logging, log_lines
from shared.service.loop_watch import ended_if_hung
from shared.service.variable_names import warn_of_unknown_variables
from shared.serving.http_guard import App
from shared.serving.http_limits import HttpLimits
from shared.serving.http_server import HttpServer
from shared.serving.listening import listening_socket
from shared.serving.metrics_server import serving_metrics
from shared.settings import ServiceSettings, from_environment

log = logging.getLogger(__name__)

EXIT_STOPPED, EXIT_CRASHED, EXIT_USER_ERROR = 0, 1, 2
"""Stopped on request; crashed, so that a restart may help; a setting is wrong."""
HTTP_SHUTDOWN_S = 5
"""Time for requests in progress to finish, in seconds."""
_PING_TIMEOUT_S = 1.0
_SettingsT = TypeVar("_SettingsT", bound=ServiceSettings)


def settings_of_process(kind: type[_SettingsT]) -> _SettingsT | None:
    """Read the settings, hide the secrets and set up the logs; return None if a setting is wrong, which is logged.

    Call it before the first child process starts.
    """
    configure_first_logging(os.environ)
    warn_of_unknown_variables(os.environ)
    try:
        settings = from_environment(kind)
    except UserError as error:
        log_lines(log, error)
        return None
    hide_secrets(os.environ)
    close_to_others()
    configure_logging(settings.log_level, log_format=settings.log_format)
    return settings


def exit_code_of(error: HeadraceError | ExceptionGroup[Exception]) -> int:
    """Log the first failure and return the exit code for it. Raises ``error`` if that is not a HeadraceError."""
    cause = _first(error)
    if not isinstance(cause, HeadraceError):
        raise error
    log.critical("%s", cause)
    return EXIT_USER_ERROR if isinstance(cause, UserError) else EXIT_CRASHED


async def serve_beside(
    work: Callable[[], Coroutine[Any, Any, None]],
    *,
    settings: ServiceSettings,
    name: Literal["rewarder", "sessions"],
    registry: CollectorRegistry,
    guarded: Callable[[HttpLimits], App],
    stop: Callable[["asyncio.Task[None]"], Awaitable[None]],
    close: Callable[["asyncio.Task[None]"], Awaitable[None]],
) -> None:
    """Serve HTTP and do the work until SIGTERM or SIGINT.

    Args:
        work: The work; it is cancelled at the end.
        settings: Settings of the process.
        name: Name of the service, for logs.
        registry: The metrics to serve.
        guarded: Returns the ASGI application behind its key checks and the given limits.
        stop: Ends the work, gently if that is possible.
        close: Called with the ended work, to report its failure and close connections.

    Raises:
        UserError: A port is taken, or the certificate cannot be used.
        BaseException: The failure of the work.
    """
    certificate = settings.certificate()
    asked_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop.set)
    with (
        serving_metrics(registry, host=settings.host, port=settings.metrics_port),
        listening_socket(settings.host, settings.port) as door,
        ended_if_hung(f"the {name}"),
    ):
        limits = settings.http_limits()
        server = HttpServer(guarded(limits), limits, certificate=certificate, drain_s=HTTP_SHUTDOWN_S)
        http = asyncio.create_task(server.serve(sockets=[door]), name="http server")
        working = asyncio.create_task(work(), name=f"{name} work")
        signalled = asyncio.create_task(asked_to_stop.wait(), name="signal")
        host, port = door.getsockname()[:2]
        log.info("%s listens on %s://%s:%d", name, settings.scheme, host, port)
        try:
            await asyncio.wait({http, working, signalled}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            server.should_exit = True
            await stop(working)
            await asyncio.gather(http, return_exceptions=True)
            signalled.cancel()
            await close(working)
    if not working.cancelled():
        working.result()
    http.result()


async def cancel(work: "asyncio.Task[None]") -> None:
    """Cancel the work and wait for its end."""
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def say_why_it_ended(
    work: "asyncio.Task[None]", redis: Redis, kind: Literal["rewarder", "sessions"], replica_id: str
) -> None:
    """Write the reason to Redis if the work failed, for people who look at a run."""
    failure = None if work.cancelled() else work.exception()
    if failure is not None:
        cause = _first(failure)
        reason = str(cause) if isinstance(cause, HeadraceError) else f"{type(cause).__name__}: {cause}"
        await refuse(redis, kind, replica_id, f"it ended, saying: {reason}", run_id=None)


async def why_redis_is_away(redis: Redis) -> str | None:
    """Return the reason for /readyz if Redis does not answer a ping; otherwise None."""
    try:
        async with asyncio.timeout(_PING_TIMEOUT_S):
            await cast("Any", redis).ping()
    except (RedisError, OSError) as error:  # TimeoutError is an OSError
        log.warning("not ready: Redis: %s", error)
        return "Redis does not answer"
    return None


def _first(error: BaseException) -> BaseException:
    """Return the first exception in a possibly nested group."""
    cause = error
    while isinstance(cause, BaseExceptionGroup):
        cause = cast("BaseExceptionGroup[BaseException]", cause).exceptions[0]
    return cause
