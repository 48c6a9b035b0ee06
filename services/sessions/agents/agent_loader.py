"""Loads the agent program of a run: a Python function, or a program behind a URL.

The worker processes for functions start with the first run that has one.
"""

import asyncio

import httpx

from services.sessions.agents.agent_programs import AgentFunction, AgentProgram, AgentUrl
from services.sessions.agents.agent_tasks import AgentPool
from services.sessions.settings import SessionsSettings


class AgentLoader:
    """Loads the agent programs of all runs, and keeps the worker processes for programs that are Python functions.

    Args:
        settings: Settings of this process.
        pool: The worker processes for Python functions.
        http: Client made by agent_http_client, for programs behind URLs.
    """

    def __init__(self, settings: SessionsSettings, *, pool: AgentPool, http: httpx.AsyncClient) -> None:
        self._settings = settings
        self._pool = pool
        self._http = http
        self._places = asyncio.Semaphore(settings.num_agent_workers)
        self._url_places = asyncio.Semaphore(settings.max_open_sessions)
        self._needs_workers = asyncio.Event()
        self._has_workers = asyncio.Event()

    async def keep_workers(self) -> None:
        """Start the worker processes once a run has a Python agent program; replace dead ones until cancelled.

        Raises:
            UnavailableError: No worker could be started for a minute.
        """
        await self._needs_workers.wait()
        async with self._pool:
            self._has_workers.set()
            await self._pool.watch()

    async def start_workers(self, agent: str | None) -> None:
        """Start the worker processes if the agent program is a Python function, and wait until they run."""
        if agent is not None and "://" not in agent:
            self._needs_workers.set()
            await self._has_workers.wait()

    async def load(self, agent: str | None, *, lane: str, timeout_s: float) -> AgentProgram | None:
        """Return the agent program of a run; None if it has none.

        Args:
            agent: The run's option ``agent``: ``package.module:function``, or a URL.
            lane: The run's id, or ``check`` for a run that is being submitted. Worker processes serve lanes in turn.
            timeout_s: Deadline of importing the module, in seconds.

        Raises:
            UserError: The program cannot be used. The message says what to do.
        """
        if agent is None:
            return None
        if "://" in agent:
            return AgentUrl(agent, self._http, self._url_places, allowed=self._settings.agent_origins)
        return await AgentFunction.load(agent, self._pool, self._places, lane=lane, check_timeout_s=timeout_s)
