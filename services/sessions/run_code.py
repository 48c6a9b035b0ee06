"""Loads the user's code of an agent run: tools, MCP servers, environments and an agent program.

    options of the run --loaded--> RunCode, usable until the block ends

The worker processes for tools start with the first run that has tools.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.sessions.agents.agent_loader import AgentLoader
from services.sessions.agents.agent_programs import AgentProgram
from services.sessions.environment_choice import EnvironmentChoice
from services.sessions.environment_rollout import Environments
from services.sessions.origins import require_allowed
from services.sessions.settings import SessionsSettings
from services.sessions.tools.joined_tools import JoinedTools, ToolSource, require_distinct
from services.sessions.tools.mcp_config import McpServer, read_mcp_servers
from services.sessions.tools.openenv_server import OpenEnvServer
from services.sessions.tools.python_environments import PythonEnvironments
from services.sessions.tools.tool_tasks import ToolPool
from services.sessions.tools.user_tools import UserTools
from shared.run_options.agents import AgentOptions


@dataclass(frozen=True)
class RunCode:
    """The loaded code of one run: its tools, and its environments and agent program if it has them."""

    tools: JoinedTools
    environments: EnvironmentChoice | None
    agent: AgentProgram | None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of everything that the model may call, in OpenAI's format."""
        return [*self.tools.schemas, *(self.environments.schemas if self.environments is not None else [])]


class RunCodeLoader:
    """Loads the user's code of each agent run, and starts the worker processes that it needs.

    Args:
        settings: Settings of this process.
        pool: The worker processes for tools.
        agents: Loads agent programs.
    """

    def __init__(self, settings: SessionsSettings, *, pool: ToolPool, agents: AgentLoader) -> None:
        self._settings = settings
        self._pool = pool
        self._agents = agents
        self._needs_workers = asyncio.Event()
        self._has_workers = asyncio.Event()

    @property
    def lacks_workers(self) -> bool:
        """Whether tool workers are needed, and none is alive: all have died, and no new one could be started."""
        return self._has_workers.is_set() and self._pool.num_alive == 0

    async def keep_workers(self) -> None:
        """Start the worker processes for tools once a run has tools, and replace dead ones. Runs until cancelled.

        Raises:
            UnavailableError: No worker could be started for a minute.
        """
        await self._needs_workers.wait()
        async with self._pool:
            self._has_workers.set()
            await self._pool.watch()

    async def start_workers(self, options: AgentOptions) -> None:
        """Start the worker processes that a run's tools and agent program need, and wait until they run."""
        if options.tools:
            self._needs_workers.set()
            await self._has_workers.wait()
        await self._agents.start_workers(options.agent)

    @contextlib.asynccontextmanager
    async def loaded(self, options: AgentOptions, *, lane: str, timeout_s: float) -> AsyncGenerator[RunCode]:
        """Load a run's code from its current files, and connect to its MCP servers until the block ends.

        Args:
            options: The run's options.
            lane: The run's id, or ``check`` for a run that is being submitted. Worker processes serve lanes in turn.
            timeout_s: Deadline of importing a module, and of connecting to a server, in seconds.

        Raises:
            UserError: A tool, server, environment or agent program cannot be used. The message says what to do.
        """
        servers = read_mcp_servers(self._settings.mcp_config, options.mcp_servers)
        async with contextlib.AsyncExitStack() as stack:
            connect = partial(_connect, stack, call_timeout_s=options.tool_timeout_s, connect_timeout_s=timeout_s)
            tools, environments, agent, *connected = await at_the_same_time(
                self._tools(options, lane=lane, timeout_s=timeout_s),
                self._environments(options, timeout_s=timeout_s),
                self._agents.load(options.agent, lane=lane, timeout_s=timeout_s),
                *(connect(name, server) for name, server in servers.items()),
            )
            of_servers = dict(zip((f"MCP server {name}" for name in servers), connected, strict=True))
            code = RunCode(JoinedTools({"tools": tools, **of_servers}), environments, agent)
            for each in environments.all if environments is not None else ():
                require_distinct({"tools": code.tools.schemas, each.name: each.schemas})
            yield code

    async def _tools(self, options: AgentOptions, *, lane: str, timeout_s: float) -> UserTools:
        return await UserTools.load(
            options.tools, self._pool, lane=lane, tool_timeout_s=options.tool_timeout_s, check_timeout_s=timeout_s
        )

    async def _environments(self, options: AgentOptions, *, timeout_s: float) -> EnvironmentChoice | None:
        at_once = asyncio.Semaphore(self._settings.max_environments)
        factories = options.environment_factories()
        loaded = await at_the_same_time(
            *(
                self._environments_of(factory, options, at_once=at_once, timeout_s=timeout_s)
                for factory in factories.values()
            )
        )
        return EnvironmentChoice(dict(zip(factories, loaded, strict=True))) if factories else None

    async def _environments_of(
        self, factory: str, options: AgentOptions, *, at_once: asyncio.Semaphore, timeout_s: float
    ) -> Environments:
        settings = self._settings
        if "://" in factory:
            require_allowed(
                factory,
                settings.environment_origins,
                option="environment_factory",
                what="OpenEnv servers",
                variable="HEADRACE_ENVIRONMENT_ORIGINS",
            )
            return await OpenEnvServer.load(
                factory,
                timeout_s=options.tool_timeout_s,
                check_timeout_s=timeout_s,
                at_once=at_once,
                wait_s=settings.queue_timeout_s,
            )
        return await PythonEnvironments.load(
            factory,
            settings.places(),
            settings.limits(),
            timeout_s=options.tool_timeout_s,
            import_timeout_s=timeout_s,
            at_once=at_once,
        )


async def _connect(
    stack: contextlib.AsyncExitStack, name: str, server: McpServer, *, call_timeout_s: float, connect_timeout_s: float
) -> ToolSource:
    """Connect to an MCP server, and return its tools. The connection closes with the exit stack."""
    from services.sessions.tools.mcp_tools import McpTools  # a second, for the runs that need it

    return await stack.enter_async_context(
        McpTools.connected(name, server, call_timeout_s=call_timeout_s, connect_timeout_s=connect_timeout_s)
    )


async def at_the_same_time(*loading: Coroutine[Any, Any, Any]) -> list[Any]:
    """Await coroutines concurrently, and return their results. If one fails, cancel the others and raise its error."""
    tasks = [asyncio.create_task(each, name="load a run's code") for each in loading]
    failures: list[BaseException] = []
    try:
        if tasks:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failures = [error for task in ended if not task.cancelled() and (error := task.exception()) is not None]
    finally:
        for task in tasks:
            task.cancel()
        # A TaskGroup forgets a cancellation that comes while it waits here, after an error.
        await asyncio.gather(*tasks, return_exceptions=True)
    if failures:
        raise failures[0]
    return [task.result() for task in tasks]
