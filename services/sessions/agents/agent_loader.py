"""Loads the agent programs of runs. The workers for functions start with the first run that has one."""

import asyncio

import httpx

from services.sessions.agents.agent_programs import AgentFunction, AgentProgram, AgentUrl
from services.sessions.agents.agent_tasks import AgentPool
from services.sessions.settings import SessionsSettings


class AgentLoader:
    """The agent programs of all runs.

    Args:
        settings: Settings of this process.
        pool: Runs the functions.
        http: Client of agent_http_client.
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
        """Start the workers once they are needed, and replace dead ones. Runs until cancelled.

        Raises:
            UnavailableError: No worker could be started for a minute.
        """
        await self._needs_workers.wait()
        async with self._pool:
            self._has_workers.set()
            await self._pool.watch()

    async def start_workers(self, agent: str | None) -> None:
        """Start the workers if the program is a function, and wait until they are there."""
        if agent is not None and "://" not in agent:
            self._needs_workers.set()
            await self._has_workers.wait()

    async def load(self, agent: str | None, *, lane: str, timeout_s: float) -> AgentProgram | None:
        """Return the agent program of a run; None if it has none.

        Args:
            agent: The run's option.
            lane: The run's id.
            timeout_s: Deadline of importing its module, in seconds.

        Raises:
            UserError: It cannot be used. The message says what to do.
        """
        if agent is None:
            return None
        if "://" in agent:
            return AgentUrl(agent, self._http, self._url_places, allowed=self._settings.agent_origins)
        return await AgentFunction.load(agent, self._pool, self._places, lane=lane, check_timeout_s=timeout_s)
