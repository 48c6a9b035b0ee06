"""Plays one prompt group: its ``num_generations`` rollouts of several turns at the same time, a session for each."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from services.sessions.agent_rollout import AgentPlayer
from services.sessions.environment_choice import EnvironmentChoice
from services.sessions.recording.recorded import Entry
from services.sessions.session import Session, TurnSource
from services.sessions.session_metrics import SessionMetrics
from services.sessions.session_store import GroupStore
from services.sessions.tool_rollout import Limits, ToolRollout, Tools, play
from shared.errors import MessageError
from shared.messages import CompletedGroup, PromptGroup, Rollout, Stamp
from shared.turns import TurnRefusedError, as_conversation


class GroupPlayer:
    """Plays the prompt groups of one run: each rollout with the run's tools, environments or agent program.

    Args:
        generators: Source of the sampled turns.
        tools: The run's tools.
        agent: Plays the rollouts in the place of the tools, if the run has an agent program.
        environments: Start an environment for each rollout, if the run has them.
        limits: The run's limits of one rollout.
        metrics: Receives the counts.
        by: Name of this replica, recorded with the time stamps of the completed groups.
    """

    def __init__(
        self,
        *,
        generators: TurnSource,
        tools: Tools,
        agent: AgentPlayer | None = None,
        environments: EnvironmentChoice | None = None,
        limits: Limits,
        metrics: SessionMetrics,
        by: str,
    ) -> None:
        self._generators = generators
        self._tools = tools
        self._agent = agent
        self._environments = environments
        self._limits = limits
        self._metrics = metrics
        self._by = by

    async def play(self, prompt: PromptGroup, store: GroupStore, *, claimed_at_s: float) -> CompletedGroup:
        """Play all rollouts of a group to their ends, and return the completed group.

        Args:
            prompt: The group's prompt, row and number of rollouts.
            store: Stores the entries. Turns that it has already, perhaps from another replica, are not sampled again.
            claimed_at_s: When this replica claimed the group, in Unix seconds.

        Raises:
            MessageError: The model can never take the prompt, or the recorded entries cannot be used.
            GroupTakenError: Another replica plays the group.
            StateLostError: The run's streams are gone.
        """
        recorded = await store.load()
        try:
            async with asyncio.TaskGroup() as rollouts:
                tasks = [
                    rollouts.create_task(
                        self._rollout(prompt, branch, store, recorded.get(branch, [])),
                        name=f"rollout {prompt.group_id}-{branch}",
                    )
                    for branch in range(prompt.num_generations)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return CompletedGroup(
            prompt=prompt,
            rollouts=tuple(task.result() for task in tasks),
            stamps=(Stamp("claimed", claimed_at_s, self._by), Stamp("generated", time.time(), self._by)),
        )

    async def _rollout(
        self,
        prompt: PromptGroup,
        branch: int,
        store: GroupStore,
        entries: Sequence[Entry],
    ) -> Rollout:
        rollout_id = f"{prompt.group_id}-{branch}"
        session = Session(
            rollout_id,
            run_id=prompt.run_id,
            generators=self._generators,
            record=partial(store.record, branch),
            entries=entries,
            routing_key=prompt.group_id,
        )
        try:
            played = await self._play(session, prompt)
        except TurnRefusedError as error:
            raise MessageError(f"rollout {rollout_id} cannot be played: {error}") from error
        finally:
            await session.close()
        self._metrics.count(played, session.recording)
        return Rollout(
            rollout_id=rollout_id,
            group_id=prompt.group_id,
            branch=branch,
            rows=session.recording.rows(),
            completion=played.completion,
            lost=played.lost,
            tool_calls=played.num_calls,
            tool_failures=played.num_failed,
            environment=played.environment,
        )

    async def _play(self, session: Session, prompt: PromptGroup) -> ToolRollout:
        if self._agent is not None:
            return await self._agent.play(session, prompt)
        if self._environments is None:
            return await play(session, as_conversation(prompt.prompt), tools=self._tools, limits=self._limits)
        with self._metrics.environments.track_inprogress():
            return await self._environments.play(session, prompt, tools=self._tools, limits=self._limits)
