"""Runs the trainer service: HTTP server, supervisor and metrics, and ends them in order.

    SIGTERM --> stopping --+--> event streams end, requests finish (at most 5 s)
                           +--> rank: SIGTERM, after 15 s SIGKILL; its run stays `running` for the next start

If any of the three ends, the process ends, because a part of the service is of no use. HTTP and metrics are also served
while the service waits for Redis. They report that Redis is away, and if Redis is full, runs can be deleted.
"""

import asyncio
import logging
import os
import signal
import socket
from pathlib import Path
from typing import cast

from services.trainer.first_of import first_of
from services.trainer.run_api.api import MAX_BODY_BYTES, create_app, guarded
from services.trainer.run_api.run_metrics import RunMetrics
from services.trainer.run_api.trainer_api import TrainerApi, make_api
from services.trainer.settings import TrainerSettings
from services.trainer.uploads.upload_expiry import expire_for_ever
from shared.errors import HeadraceError, UserError
from shared.redis.redis_connection import connect
from shared.redis.redis_readiness import wait_until_ready
from shared.service.child_secrets import hide_secrets
from shared.service.logs import configure_first_logging, configure_logging, log_lines
from shared.service.loop_watch import ended_if_hung
from shared.service.tls import trusted
from shared.service.variable_names import warn_of_unknown_variables
from shared.serving.http_server import HttpServer
from shared.serving.listening import listening_socket
from shared.serving.metrics_server import serving_metrics
from shared.settings import from_environment

log = logging.getLogger(__name__)

STOPPED, CRASHED, REFUSED = 0, 1, 2
_HURRY_S = 5.0
"""Time for the supervisor to end after its rank, in seconds. It may be waiting for a Redis that is full for hours."""


def run_service() -> int:
    """Run the trainer service until it is asked to stop. Return the exit status: 0 stopped, 1 crashed, 2 user error."""
    configure_first_logging(os.environ)
    warn_of_unknown_variables(os.environ)
    try:
        settings = from_environment(TrainerSettings)
    except UserError as error:
        log_lines(log, error)
        return REFUSED
    hide_secrets(os.environ)
    configure_logging(settings.log_level, log_format=settings.log_format)
    try:
        asyncio.run(serve(settings))
    except (HeadraceError, BaseExceptionGroup) as error:
        known, unknown = _split(error)
        if unknown is not None:
            raise unknown from error
        refusals = {str(leaf) for leaf in known if isinstance(leaf, UserError)}
        for sentence in sorted(refusals or {f"the trainer service ends, restart it: {leaf}" for leaf in known}):
            log.critical("%s", sentence)
        return REFUSED if refusals else CRASHED
    return STOPPED


async def serve(settings: TrainerSettings) -> None:
    """Serve the run API and metrics, and supervise runs, until SIGTERM or SIGINT.

    Raises:
        UserError: The user must fix something first; by itself or in an exception group.
        HeadraceError: Redis stayed away too long; by itself or in an exception group.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    _require_a_directory(settings.runs_dir, variable="HEADRACE_RUNS_DIR", what="runs")
    if settings.uploads_dir is not None:
        _require_a_directory(settings.uploads_dir, variable="HEADRACE_UPLOADS_DIR", what="uploads")
    if settings.code_uploads_dir is not None:
        _require_a_directory(settings.code_uploads_dir, variable="HEADRACE_CODE_UPLOADS_DIR", what="uploaded code")
    trusted(settings.tls_ca_file)  # fails now instead of when a run needs it
    redis = connect(settings.redis_url.get_secret_value())
    try:
        api = make_api(settings, redis, stopping=stopping)
        metrics = RunMetrics(redis, store=api.store, supervisor=api.supervisor)
        metrics.watch_keys(api.keyring)
        with (
            listening_socket(settings.host, settings.port) as listener,
            serving_metrics(metrics.registry, host=settings.host, port=settings.metrics_port),
            ended_if_hung("the trainer service"),
        ):
            await _serve(api, metrics, listener)
    finally:
        await redis.aclose()


def _require_a_directory(directory: Path, *, variable: str, what: str) -> None:
    """Create the directory if it is missing; raise UserError if ``what`` cannot be kept there."""
    why_not = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why_not = error.strerror or str(error)
    if not why_not and not os.access(directory, os.W_OK | os.X_OK):
        why_not = "Permission denied, or read-only"
    if why_not:
        raise UserError(
            f"{variable}: {what} cannot be kept in {directory} ({why_not}). Give a directory that user "
            f"{os.getuid()} may write into"
        )


async def _serve(api: TrainerApi, metrics: RunMetrics, listener: socket.socket) -> None:
    server = http_server(api)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]), name="HTTP server")
        supervising = tasks.create_task(_supervise(api, metrics), name="run supervisor")
        host, port = listener.getsockname()[:2]
        log.info("the run API listens on %s://%s:%d", api.settings.scheme, host, port)
        await api.stopping.wait()
        log.info("asked to stop")
        server.should_exit = True
        _, waiting = await asyncio.wait({supervising}, timeout=api.settings.rank_stop_grace_s + _HURRY_S)
        if waiting:
            log.warning("the run supervisor still waits for Redis, and is cancelled; its run keeps its status")
            supervising.cancel()


async def _supervise(api: TrainerApi, metrics: RunMetrics) -> None:
    """Supervise runs once Redis is ready, until this process is asked to stop."""
    ready = wait_until_ready(api.redis, timeout_s=api.settings.redis_patience_s)
    if await first_of(ready, api.stopping.wait(), metrics.watch_redis_for_ever()) != 0:
        return
    async with asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(metrics.refresh_for_ever(), name="metrics")]
        if api.client_files:
            expiring = expire_for_ever(api.client_files, api.store, after_s=api.settings.upload_expiry_s)
            others.append(tasks.create_task(expiring, name="expiry of uploads"))
        await api.supervisor.supervise()
        for task in others:
            task.cancel()


def http_server(api: TrainerApi) -> HttpServer:
    """Return the HTTP server of the run API; it stops when its ``should_exit`` is set."""
    limits = api.settings.http_limits(max_body_bytes=MAX_BODY_BYTES)
    return HttpServer(guarded(create_app(api), api.keyring, limits), limits, certificate=api.certificate)


def _split(error: BaseException) -> tuple[list[HeadraceError], BaseException | None]:
    """Split an error or exception group into its HeadraceErrors and the first other exception, None without one."""
    if isinstance(error, HeadraceError):
        return [error], None
    if not isinstance(error, BaseExceptionGroup):
        return [], error
    known: list[HeadraceError] = []
    unknown: BaseException | None = None
    for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
        more, other = _split(inner)
        known += more
        unknown = unknown or other
    return known, unknown
