"""Follows the agent runs: one session loop for each that is served, as long as it is served.

    served runs --look, every poll_every_s--> begin or cancel a session loop (session_loop.py)

Generators read the prompts of all other runs themselves. A run whose tools cannot be used is refused, with the reason
in Redis. The tool workers start with the first run that has tools.
"""

import asyncio
import logging
from collections import Counter

import httpx

from services.sessions.group_player import GroupPlayer
from services.sessions.session_loop import SessionLoop
from services.sessions.session_metrics import SessionMetrics
from services.sessions.settings import SessionsSettings
from services.sessions.tool_rollout import Limits
from services.sessions.tools.environments import Environments
from services.sessions.tools.tool_tasks import ToolPool
from services.sessions.tools.user_tools import UserTools
from services.sessions.turn_client import TurnClient
from shared.errors import StateLostError, UserError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.redis_readiness import wait_until_back
from shared.redis.run_record import RunRecord
from shared.redis.run_store import RunStore
from shared.redis.served_runs import ServedRuns
from shared.refusals import refuse, take_back
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)


class RunFollower:
    """Runs a session loop for every agent run that is running or paused.

    Args:
        redis: A Redis connection that is ready, with headrace's functions loaded.
        settings: Settings of this process.
        pool: Runs the tools.
        http: Client for the generators.
        metrics: Receives the counts.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        settings: SessionsSettings,
        pool: ToolPool,
        http: httpx.AsyncClient,
        metrics: SessionMetrics,
    ) -> None:
        self._redis = redis
        self._settings = settings
        self._pool = pool
        self._http = http
        self._metrics = metrics
        self.needs_workers = asyncio.Event()
        """Set once a run has tools."""
        self.has_workers = asyncio.Event()
        """Set by the owner of the pool once its workers have started."""

    async def run(self) -> None:
        """Serve all agent runs until cancelled. The groups in flight stay pending, with their recordings.

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

    async def _play_run(self, record: RunRecord) -> None:
        name = self._settings.name
        try:
            config = record.parsed_config()
            if not config.is_agentic:
                await _for_ever()
            tools = await self._tools(record.run_id, config)
            environments = await self._environments(config)
            _check_together(config, tools, environments)
        except UserError as error:
            log.error("run %s is not played: %s", record.run_id, error)  # noqa: TRY400  the message is enough
            await refuse(self._redis, "sessions", name, str(error), run_id=record.run_id)
            await _for_ever()
            return
        await take_back(self._redis, "sessions", name, run_id=record.run_id)
        played_with = [*config.tools, *filter(None, [config.environment_factory])]
        log.info("playing run %s with %s", record.run_id, ", ".join(played_with))
        try:
            await self._loop(record.run_id, config, tools, environments).run()
        except* StateLostError as errors:
            log.warning("run %s cannot be played now: %s", record.run_id, errors.exceptions[0])
            # A server that was wiped has lost headrace's functions too, and later runs need them.
            await wait_until_back(self._redis, timeout_s=self._settings.redis_patience_s)
            await asyncio.sleep(self._settings.poll_every_s)

    async def _tools(self, run_id: str, config: RunConfig) -> UserTools:
        if config.tools:
            self.needs_workers.set()
            await self.has_workers.wait()
        return await UserTools.load(
            config.tools,
            self._pool,
            lane=run_id,
            tool_timeout_s=config.tool_timeout_s,
            check_timeout_s=self._settings.import_timeout_s,
        )

    async def _environments(self, config: RunConfig) -> Environments | None:
        if config.environment_factory is None:
            return None
        return await Environments.load(
            config.environment_factory,
            self._settings.places(),
            self._settings.limits(),
            timeout_s=config.tool_timeout_s,
            import_timeout_s=self._settings.import_timeout_s,
            max_at_once=self._settings.max_environments,
        )

    def _loop(self, run_id: str, config: RunConfig, tools: UserTools, environments: Environments | None) -> SessionLoop:
        keys, name = RunKeys(run_id), self._settings.name
        player = GroupPlayer(
            generators=TurnClient(self._redis, keys=keys, http=self._http),
            tools=tools,
            environments=environments,
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


def _check_together(config: RunConfig, tools: UserTools, environments: Environments | None) -> None:
    """Raise UserError if the run has no reward at all, or two tools of one name."""
    if environments is None:
        return
    if not config.reward_funcs and not environments.has_reward:
        raise UserError(f"{environments.name} has no method get_reward, and the run has no reward_funcs; add either")
    called = Counter(schema["function"]["name"] for schema in [*tools.schemas, *environments.schemas])
    if twice := [name for name, count in called.items() if count > 1]:
        raise UserError(
            f"{', '.join(twice)}: both a tool and a method of {environments.name} have this name, and the model could "
            "not tell them apart; rename either"
        )


async def _for_ever() -> None:
    await asyncio.Event().wait()
