"""Runs a session loop for each running or paused agent run: loads the run's code, and plays its prompt groups.

    served runs --look, every poll_every_s--> begin or cancel a session loop (session_loop.py)

An agent run has tools, environments or an agent program. Generators read the prompts of all other runs themselves. A
run whose tools cannot be used is refused, with the reason in Redis.
"""

import asyncio
import contextlib
import logging
from typing import Any

import httpx

from services.sessions.agent_rollout import AgentPlayer
from services.sessions.agents.agent_programs import AgentProgram
from services.sessions.group_player import GroupPlayer
from services.sessions.open_sessions import OpenSessions
from services.sessions.run_code import RunCode, RunCodeLoader
from services.sessions.session_loop import SessionLoop
from services.sessions.session_metrics import SessionMetrics
from services.sessions.settings import SessionsSettings
from services.sessions.tool_rollout import Limits
from services.sessions.turn_client import TurnClient
from shared.errors import StateLostError, UserError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.redis_readiness import wait_until_back
from shared.redis.run_record import RunRecord
from shared.redis.run_store import RunStore
from shared.redis.served_runs import ServedRuns
from shared.refusals import refuse, take_back
from shared.run_options.agents import AgentOptions
from shared.run_options.run_config import RunConfig
from shared.service.cancellation import raise_if_cancelled

log = logging.getLogger(__name__)

_TRY_AGAIN_S = 30.0
"""Pause before the code of a run that could not be used is loaded again: a server may be back, or a file mended."""
_MAX_CHECKS = 4
"""Most checks of tools at a time. Each starts processes."""
_GRACE_S = 2.0
"""Seconds beyond the deadline of each part of a check, so that a part that is too slow is named."""


class RunFollower:
    """Plays the prompt groups of every running or paused run that has tools, environments or an agent program.

    Args:
        redis: A Redis connection that is ready, with headrace's functions loaded.
        settings: Settings of this process.
        code: Loads the runs' tools, environments and agent programs.
        http: Client for the requests to generators.
        sessions: The sessions that clients may ask for turns over HTTP.
        metrics: Receives the counts.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        settings: SessionsSettings,
        code: RunCodeLoader,
        http: httpx.AsyncClient,
        sessions: OpenSessions,
        metrics: SessionMetrics,
    ) -> None:
        self._redis = redis
        self._settings = settings
        self._code = code
        self._http = http
        self._sessions = sessions
        self._metrics = metrics
        self._checks = asyncio.Semaphore(_MAX_CHECKS)

    async def run(self) -> None:
        """Play the groups of all agent runs until cancelled. Groups in flight then stay pending, with recorded turns.

        Raises:
            UnavailableError: Redis did not come back in time.
        """
        store = RunStore(self._redis)
        serving = ServedRuns(self._play_run, name="sessions of")
        try:
            while True:
                await serving.follow(await store.served())
                await asyncio.sleep(self._settings.poll_every_s)
        finally:
            await serving.cancel()

    async def check_tools(self, options: AgentOptions) -> list[dict[str, Any]]:
        """Load the tools of a run that is being submitted, and return the JSON schemas that its model would be shown.

        Raises:
            UserError: A tool, environment, MCP server or agent program cannot be used, or the check took too long.
        """
        timeout_s = self._settings.check_timeout_s
        try:
            async with (
                asyncio.timeout(timeout_s + _GRACE_S) as limit,
                self._checks,
                self._code.loaded(options, lane="check", timeout_s=timeout_s) as code,
            ):
                limit.reschedule(None)  # servers that are slow to disconnect were loaded all the same
                return code.schemas
        except TimeoutError as error:
            raise UserError(
                f"checking these took longer than {timeout_s:g} s, with the wait for other checks: submit again, or "
                "raise HEADRACE_CHECK_TIMEOUT_S of the sessions service"
            ) from error

    async def _play_run(self, record: RunRecord) -> None:
        name = self._settings.name
        async with contextlib.AsyncExitStack() as stack:
            try:
                config = record.parsed_config()
                if not config.is_agentic:
                    await _for_ever()
                code = await stack.enter_async_context(
                    self._code.loaded(config, lane=record.run_id, timeout_s=self._settings.import_timeout_s)
                )
                _require_reward(config, code)
                await self._code.start_workers(config)
            except UserError as error:
                log.error("run %s is not played: %s", record.run_id, error)  # noqa: TRY400  the message is enough
                await refuse(self._redis, "sessions", name, str(error), run_id=record.run_id)
                await asyncio.sleep(_TRY_AGAIN_S)
                return
            await take_back(self._redis, "sessions", name, run_id=record.run_id)
            await self._play_with(code, record.run_id, config)

    async def _play_with(self, code: RunCode, run_id: str, config: RunConfig) -> None:
        played_with = [*config.tools, *config.mcp_servers, *config.environment_factories().values()]
        played_with += [config.agent] if config.agent is not None else []
        log.info("playing run %s with %s", run_id, ", ".join(played_with))
        generators = TurnClient(self._redis, keys=RunKeys(run_id), http=self._http)
        try:
            async with self._sessions.serving(run_id, generators, max_completion_length=config.max_completion_length):
                await self._loop(run_id, config, generators, code).run()
        except* StateLostError as errors:
            log.warning("run %s cannot be played now: %s", run_id, errors.exceptions[0])
        raise_if_cancelled()
        # A server that was wiped has lost headrace's functions too, and later runs need them.
        await wait_until_back(self._redis, timeout_s=self._settings.redis_patience_s)
        await asyncio.sleep(self._settings.poll_every_s)

    def _loop(self, run_id: str, config: RunConfig, generators: TurnClient, code: RunCode) -> SessionLoop:
        keys, name = RunKeys(run_id), self._settings.name
        player = GroupPlayer(
            generators=generators,
            tools=code.tools,
            environments=code.environments,
            agent=None if code.agent is None else self._agent_player(code.agent, config),
            limits=Limits(config.max_tool_calling_iterations, config.max_completion_length),
            metrics=self._metrics,
            by=name,
        )
        return SessionLoop(
            self._redis,
            keys=keys,
            player=player,
            replica_id=name,
            max_inflight_groups=self._settings.max_inflight_groups,
            metrics=self._metrics,
        )

    def _agent_player(self, agent: AgentProgram, config: RunConfig) -> AgentPlayer:
        return AgentPlayer(
            agent,
            self._sessions,
            timeout_s=config.agent_timeout_s,
            max_completion_length=config.max_completion_length,
        )


def _require_reward(config: RunConfig, code: RunCode) -> None:
    """Raise UserError if the run has no reward_funcs, and an environment has no method get_reward."""
    for environments in code.environments.all if code.environments is not None else ():
        if not config.reward_funcs and not environments.has_reward:
            raise UserError(
                f"{environments.name} has no method get_reward, and the run has no reward_funcs: add one or the other"
            )


async def _for_ever() -> None:
    await asyncio.Event().wait()
