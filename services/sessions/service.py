"""Runs one replica of the sessions service, from start to SIGTERM.

HTTP answers at once (/readyz reports what is missing) --> Redis --> agent runs are played
SIGTERM --> groups in flight stay pending with their recordings, lease released, workers killed --> exit 0
"""

import asyncio
import logging

from services.sessions.app import build_app
from services.sessions.run_follower import RunFollower
from services.sessions.session_metrics import SessionMetrics
from services.sessions.settings import SessionsSettings
from services.sessions.tools.tool_tasks import ToolPool, ToolTasks
from services.sessions.turn_client import turn_http_client
from shared.access import entrance
from shared.access.keyring import Keyring
from shared.access.route_table import SESSIONS
from shared.redis.redis_connection import connect
from shared.redis.redis_readiness import wait_until_ready
from shared.refusals import take_back
from shared.service.tls import PeerTls
from shared.service_process import cancel, say_why_it_ended, serve_beside, why_redis_is_away
from shared.serving.http_guard import App
from shared.serving.http_limits import HttpLimits
from shared.serving.shared_answer import SharedAnswer
from shared.user_code.limits import Limits

log = logging.getLogger(__name__)

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
        keyring = self._settings.keyring()
        self._metrics.watch_keys(keyring)
        await serve_beside(
            self._work,
            settings=self._settings,
            name="sessions",
            registry=self._metrics.registry,
            guarded=lambda limits: self.guarded(keyring, limits),
            stop=cancel,
            close=self._report_and_close,
        )

    def guarded(self, keyring: Keyring, limits: HttpLimits) -> App:
        """Return the application behind access control and HTTP limits."""
        app = build_app(
            why_not_ready=SharedAnswer(self._why_not_ready),
            check_tools=self._runs.check_tools,
            replica_id=self._settings.name,
        )
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

    async def _report_and_close(self, work: "asyncio.Task[None]") -> None:
        await say_why_it_ended(work, self._redis, "sessions", self._settings.name)
        await self.close()

    async def _why_not_ready(self) -> str | None:
        if self._starting is not None:
            return self._starting
        if self._runs.has_workers.is_set() and self._pool.num_alive == 0:
            return "no tool worker is running"
        return await why_redis_is_away(self._redis)
