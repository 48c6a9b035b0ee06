"""Runs one replica of the sessions service, from start to SIGTERM.

HTTP answers at once (/readyz reports what is missing) --> Redis --> agent runs are played
SIGTERM --> prompt groups in flight stay pending, the turns sampled so far stay in Redis,
            lease released, workers killed --> exit 0
"""

import asyncio
import logging

from services.sessions.agents.agent_loader import AgentLoader
from services.sessions.agents.agent_programs import agent_http_client
from services.sessions.agents.agent_tasks import AgentPool, AgentTasks
from services.sessions.app import build_app
from services.sessions.open_sessions import OpenSessions
from services.sessions.run_code import RunCodeLoader
from services.sessions.run_follower import RunFollower
from services.sessions.session_api.client_errors import with_client_errors
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

log = logging.getLogger(__name__)


class SessionsService:
    """One replica of the sessions service: its Redis and HTTP clients, worker pools, sessions and served runs.

    Raises:
        UserError: The file with CA certificates cannot be used.
    """

    def __init__(self, settings: SessionsSettings) -> None:
        self._settings = settings
        self._metrics = SessionMetrics()
        self._metrics.name_replica(settings.name)
        self._redis = connect(settings.redis_url.get_secret_value())
        pool = ToolPool(
            ToolTasks(settings.places()),
            num_workers=settings.num_tool_workers,
            limits=settings.limits(),
            queue_timeout_s=settings.queue_timeout_s,
            import_timeout_s=settings.import_timeout_s,
            metrics=self._metrics,
        )
        self._http = turn_http_client(
            internal_key=settings.internal_key.get_secret_value(),
            peers=PeerTls(settings.tls_ca_file, settings.tls_generator_name),
        )
        agent_pool = AgentPool(
            AgentTasks(settings.places()),
            num_workers=settings.num_agent_workers,
            limits=settings.limits(),
            queue_timeout_s=settings.queue_timeout_s,
            import_timeout_s=settings.import_timeout_s,
            metrics=self._metrics,
            role="agent",
        )
        self._agent_http = agent_http_client()
        limits = settings.http_limits()
        self._sessions = OpenSessions(
            url=settings.url(settings.port),
            max_sessions=settings.max_open_sessions,
            # Each turn under way has a connection, and rollouts and probes need some too.
            max_turns=min(limits.max_requests, (limits.max_connections - limits.max_requests) // 2),
        )
        self._agents = AgentLoader(settings, pool=agent_pool, http=self._agent_http)
        self._code = RunCodeLoader(settings, pool=pool, agents=self._agents)
        self._runs = RunFollower(
            self._redis,
            settings=settings,
            code=self._code,
            http=self._http,
            sessions=self._sessions,
            metrics=self._metrics,
        )
        self._starting: str | None = "starting: waiting for Redis"

    async def run(self) -> None:
        """Serve HTTP and play the rollouts of agent runs until SIGTERM or SIGINT.

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
            sessions=self._sessions,
            replica_id=self._settings.name,
        )
        return with_client_errors(entrance.guarded(app, routes=SESSIONS, keyring=keyring, limits=limits))

    async def close(self) -> None:
        """Close the HTTP clients and the connections to Redis."""
        await self._http.aclose()
        await self._agent_http.aclose()
        await self._redis.aclose()

    async def _work(self) -> None:
        await wait_until_ready(self._redis, timeout_s=self._settings.redis_patience_s)
        await take_back(self._redis, "sessions", self._settings.name, run_id=None)
        self._starting = None
        async with asyncio.TaskGroup() as beside:
            beside.create_task(self._code.keep_workers(), name="tool workers")
            beside.create_task(self._agents.keep_workers(), name="agent workers")
            await self._runs.run()

    async def _report_and_close(self, work: "asyncio.Task[None]") -> None:
        await say_why_it_ended(work, self._redis, "sessions", self._settings.name)
        await self.close()

    async def _why_not_ready(self) -> str | None:
        if self._starting is not None:
            return self._starting
        if self._code.lacks_workers:
            return "no tool worker is running"
        return await why_redis_is_away(self._redis)
