"""Runs one replica of the sessions service, from start to SIGTERM.

HTTP answers at once (/readyz reports what is missing) --> Redis --> agent runs are played
SIGTERM --> groups in flight stay pending with their recordings, lease released, workers killed --> exit 0
"""

import asyncio
import logging
import signal
from typing import Any, cast

from redis.exceptions import RedisError

from services.sessions.app import build_app
from services.sessions.run_follower import RunFollower
from services.sessions.session_metrics import SessionMetrics
from services.sessions.settings import SessionsSettings
from services.sessions.tools.tool_tasks import ToolPool, ToolTasks
from services.sessions.turn_client import turn_http_client
from shared.access import entrance
from shared.access.keyring import Keyring
from shared.access.route_table import SESSIONS
from shared.errors import HeadraceError
from shared.redis.redis_connection import connect
from shared.redis.redis_readiness import wait_until_ready
from shared.refusals import refuse, take_back
from shared.service.tls import PeerTls
from shared.serving.http_guard import App
from shared.serving.http_limits import HttpLimits
from shared.serving.http_server import HttpServer
from shared.serving.listening import listening_socket
from shared.serving.metrics_server import serving_metrics
from shared.serving.shared_answer import SharedAnswer
from shared.user_code.limits import Limits

log = logging.getLogger(__name__)

_HTTP_SHUTDOWN_S = 5
_PING_TIMEOUT_S = 1.0
_MIB = 1024 * 1024


class SessionsService:
    """One process of the service with all its parts.

    Raises:
        UserError: The file with certificates cannot be used.
    """

    def __init__(self, settings: SessionsSettings) -> None:
        self._settings = settings
        self._metrics = SessionMetrics()
        self._metrics.name_replica(settings.name)
        self._redis = connect(settings.redis_url.get_secret_value())
        self._pool = ToolPool(
            ToolTasks(settings.places()),
            num_workers=settings.num_tool_workers,
            limits=Limits(settings.worker_memory_mib * _MIB, settings.worker_open_files),
            queue_timeout_s=settings.queue_timeout_s,
            import_timeout_s=settings.import_timeout_s,
            metrics=self._metrics,
        )
        self._http = turn_http_client(
            internal_key=settings.internal_key.get_secret_value(),
            peers=PeerTls(settings.tls_ca_file, settings.tls_generator_name),
        )
        self._runs = RunFollower(
            self._redis, settings=settings, pool=self._pool, http=self._http, metrics=self._metrics
        )
        self._starting: str | None = "starting: waiting for Redis"

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises:
            UserError: A port is taken, or Redis, the keys file or the certificate cannot be used.
            UnavailableError: Redis did not answer in time, or no tool worker could be started for a minute.
        """
        keyring, certificate = self._settings.keyring(), self._settings.certificate()
        self._metrics.watch_keys(keyring)
        asked_to_stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, asked_to_stop.set)
        host = self._settings.host
        with (
            serving_metrics(self._metrics.registry, host=host, port=self._settings.metrics_port),
            listening_socket(host, self._settings.port) as door,
        ):
            limits = self._settings.http_limits()
            server = HttpServer(
                self.guarded(keyring, limits), limits, certificate=certificate, drain_s=_HTTP_SHUTDOWN_S
            )
            http = asyncio.create_task(server.serve(sockets=[door]), name="http server")
            work = asyncio.create_task(self._work(), name="sessions work")
            stop = asyncio.create_task(asked_to_stop.wait(), name="signal")
            host, port = door.getsockname()[:2]
            log.info("sessions listens on %s://%s:%d", self._settings.scheme, host, port)
            try:
                await asyncio.wait({http, work, stop}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                server.should_exit = True
                for task in (work, stop):
                    task.cancel()
                await asyncio.gather(http, work, stop, return_exceptions=True)
                await self._say_why_it_ended(work)
                await self.close()
        if not work.cancelled():
            work.result()
        http.result()

    def guarded(self, keyring: Keyring, limits: HttpLimits) -> App:
        """Return the application behind access control and HTTP limits."""
        app = build_app(why_not_ready=SharedAnswer(self._why_not_ready), replica_id=self._settings.name)
        return entrance.guarded(app, routes=SESSIONS, keyring=keyring, limits=limits)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()
        await self._redis.aclose()

    async def _work(self) -> None:
        await wait_until_ready(self._redis, timeout_s=self._settings.redis_patience_s)
        await take_back(self._redis, "sessions", self._settings.name, run_id=None)
        self._starting = None
        async with asyncio.TaskGroup() as beside:
            beside.create_task(self._keep_tool_workers(), name="tool workers")
            await self._runs.run()

    async def _keep_tool_workers(self) -> None:
        await self._runs.needs_workers.wait()
        async with self._pool:
            self._runs.has_workers.set()
            await self._pool.watch()

    async def _say_why_it_ended(self, work: "asyncio.Task[None]") -> None:
        """Write the reason of a failure to Redis, where people who look at a run can see it."""
        failure = None if work.cancelled() else work.exception()
        while isinstance(failure, BaseExceptionGroup):
            failure = cast("BaseExceptionGroup[BaseException]", failure).exceptions[0]
        if failure is not None:
            reason = str(failure) if isinstance(failure, HeadraceError) else f"{type(failure).__name__}: {failure}"
            await refuse(self._redis, "sessions", self._settings.name, f"it ended, saying: {reason}", run_id=None)

    async def _why_not_ready(self) -> str | None:
        if self._starting is not None:
            return self._starting
        if self._runs.has_workers.is_set() and self._pool.num_alive == 0:
            return "no tool worker is running"
        try:
            async with asyncio.timeout(_PING_TIMEOUT_S):
                await cast("Any", self._redis).ping()
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            log.warning("not ready: Redis: %s", error)
            return "Redis does not answer"
        return None
