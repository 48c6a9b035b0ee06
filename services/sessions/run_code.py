"""Loads what the user of a run gave it to play with: tools, MCP servers, an environment, an agent program.

    options of agents --loaded--> RunCode, until the block ends

The workers for tools start with the first run that has some.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from services.sessions.agents.agent_loader import AgentLoader
from services.sessions.agents.agent_programs import AgentProgram
from services.sessions.environment_choice import EnvironmentChoice
from services.sessions.environment_rollout import Environments
from services.sessions.origins import require_allowed
from services.sessions.settings import SessionsSettings
from services.sessions.tools.joined_tools import JoinedTools, ToolSource, require_distinct
from services.sessions.tools.mcp_config import read_mcp_servers
from services.sessions.tools.openenv_server import OpenEnvServer
from services.sessions.tools.python_environments import PythonEnvironments
from services.sessions.tools.tool_tasks import ToolPool
from services.sessions.tools.user_tools import UserTools
from shared.run_options.agents import AgentOptions


@dataclass(frozen=True)
class RunCode:
    """The user's part of one run."""

    tools: JoinedTools
    environments: EnvironmentChoice | None
    agent: AgentProgram | None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of everything that the model may call, in OpenAI's format."""
        return [*self.tools.schemas, *(self.environments.schemas if self.environments is not None else [])]


class RunCodeLoader:
    """Loads the code of all runs.

    Args:
        settings: Settings of this process.
        pool: Runs the tools.
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
        """Whether all tool workers have died and none could be started anew."""
        return self._has_workers.is_set() and self._pool.num_alive == 0

    async def keep_workers(self) -> None:
        """Start the tool workers once they are needed, and replace dead ones. Runs until cancelled.

        Raises:
            UnavailableError: No worker could be started for a minute.
        """
        await self._needs_workers.wait()
        async with self._pool:
            self._has_workers.set()
            await self._pool.watch()

    async def start_workers(self, options: AgentOptions) -> None:
        """Start the workers that a run needs, and wait until they are there. Code is loaded without them."""
        if options.tools:
            self._needs_workers.set()
            await self._has_workers.wait()
        await self._agents.start_workers(options.agent)

    @contextlib.asynccontextmanager
    async def loaded(self, options: AgentOptions, *, lane: str, timeout_s: float) -> AsyncGenerator[RunCode]:
        """Load a run's code from its current files, and connect to its MCP servers until the block ends.

        Args:
            options: The run's options.
            lane: The run's id. Runs take turns at the workers.
            timeout_s: Deadline of importing a module, and of connecting to a server, in seconds.

        Raises:
            UserError: Something of it cannot be used. The message says what to do.
        """
        servers = read_mcp_servers(self._settings.mcp_config, options.mcp_servers)
        async with contextlib.AsyncExitStack() as stack:
            sources: dict[str, ToolSource] = {"tools": await self._tools(options, lane=lane, timeout_s=timeout_s)}
            for name, server in servers.items():
                from services.sessions.tools.mcp_tools import McpTools  # a second, for the runs that need it

                sources[f"MCP server {name}"] = await stack.enter_async_context(
                    McpTools.connected(name, server, call_timeout_s=options.tool_timeout_s, connect_timeout_s=timeout_s)
                )
            code = RunCode(
                JoinedTools(sources),
                await self._environments(options, timeout_s=timeout_s),
                await self._agents.load(options.agent, lane=lane, timeout_s=timeout_s),
            )
            for environments in code.environments.all if code.environments is not None else ():
                require_distinct({"tools": code.tools.schemas, environments.name: environments.schemas})
            yield code

    async def _tools(self, options: AgentOptions, *, lane: str, timeout_s: float) -> UserTools:
        return await UserTools.load(
            options.tools, self._pool, lane=lane, tool_timeout_s=options.tool_timeout_s, check_timeout_s=timeout_s
        )

    async def _environments(self, options: AgentOptions, *, timeout_s: float) -> EnvironmentChoice | None:
        at_once = asyncio.Semaphore(self._settings.max_environments)
        by_name = {
            name: await self._environments_of(factory, options, at_once=at_once, timeout_s=timeout_s)
            for name, factory in options.environment_factories().items()
        }
        return EnvironmentChoice(by_name) if by_name else None

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
