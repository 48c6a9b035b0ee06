"""Plays one rollout in an environment of its own, as TRL does with ``environment_factory``.

    start --> reset(row) --> its text is appended to the prompt --> tool_rollout.py --> state --> get_reward --> end
                                                                     its methods are tools

The environment's state is in its process, and dies with it or with this replica. A replica that goes on with a rollout
begins a new environment, resets it with the same row, and makes the recorded calls again, in order. The rollout goes on
if the new environment says what was recorded, and is lost, with the reason, if it does not. A rollout that was played
to its end needs no environment any more: its end is recorded.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from services.sessions.recording.recorded import RolloutEnd
from services.sessions.session import Session
from services.sessions.session_store import SessionFullError
from services.sessions.tool_rollout import CANNOT_BE_REBUILT, Limits, ToolRollout, Tools, play
from services.sessions.tools.environments import Environment, Environments
from services.sessions.tools.tool_errors import ToolLostError
from shared.messages import PlayedEnvironment, PromptGroup, with_observation
from shared.turns import ChatMessage, TurnRefusedError, as_conversation


class _ToolsOfRollout:
    """The run's tools, and the methods of the rollout's environment."""

    def __init__(self, tools: Tools, environment: Environment, schemas: Sequence[dict[str, Any]]) -> None:
        self.schemas = [*tools.schemas, *schemas]
        self._tools = tools
        self._environment = environment

    def keeps_state(self, name: str) -> bool:
        """See Tools."""
        return self._environment.has(name) or self._tools.keeps_state(name)

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """See Tools."""
        return await (self._environment if self._environment.has(name) else self._tools).call(name, arguments)


async def play_in_environment(
    session: Session, prompt: PromptGroup, *, environments: Environments, tools: Tools, limits: Limits
) -> ToolRollout:
    """Play a rollout to its end, from where its recording ends.

    Raises:
        TurnRefusedError: The model cannot take the prompt.
        GroupTakenError: Another replica plays the rollout.
    """
    if (end := session.recording.end) is not None:
        return ToolRollout(end.completion, end.num_calls, end.num_failed, environment=end.environment)
    rollout, played = ToolRollout(), PlayedEnvironment(environments.name, environments.has_reward)
    observation = ""
    try:
        async with environments.started() as environment:
            observation = await environment.reset({**prompt.columns, "prompt": prompt.prompt}, seed=session.session_id)
            conversation = as_conversation(with_observation(prompt.prompt, observation))
            _require_same_prompt(session, conversation)
            rollout = await play(
                session,
                conversation,
                tools=_ToolsOfRollout(tools, environment, environments.schemas),
                limits=limits,
            )
            played = msgspec.structs.replace(played, observation=observation)
            if not rollout.lost:
                end = await _end(rollout, played, environment)
                await session.record(end)
                played = end.environment
    except TurnRefusedError as refusal:
        if not observation:
            raise
        rollout.lost = f"its first turn, with the text that reset returned, was refused: {refusal}"
    except (ToolLostError, SessionFullError) as error:
        rollout.lost = str(error)
    rollout.environment = played
    return rollout


def _require_same_prompt(session: Session, conversation: list[ChatMessage]) -> None:
    """Raise ToolLostError if the recorded turns began with another prompt."""
    if session.recording.prompt not in (None, conversation):
        raise ToolLostError(f"{CANNOT_BE_REBUILT}: reset, called again with the same row, returned another text")


async def _end(rollout: ToolRollout, played: PlayedEnvironment, environment: Environment) -> RolloutEnd:
    state = await environment.state()  # before get_reward, as TRL's reward functions see it
    reward = await environment.reward()
    return RolloutEnd(
        rollout.completion,
        rollout.num_calls,
        rollout.num_failed,
        msgspec.structs.replace(played, reward=reward, attributes=state.attributes, left_out=state.left_out),
    )
