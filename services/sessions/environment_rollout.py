"""Plays one rollout in an environment of its own, as TRL does with ``environment_factory``.

    start --> reset(row) --> its text is appended to the prompt --> tool_rollout.py --> state --> get_reward --> end
                                                                    (the environment's methods are tools)

The environment is an object in Python in a process of its own (tools/python_environments.py), or a session of an
OpenEnv server (tools/openenv_server.py). Its state is lost when it ends or this replica dies. A replica that takes the
rollout over starts a new environment, resets it with the same row, and repeats the recorded calls in order. If the
results differ from the recorded ones, the rollout is lost (not scored and not trained), with the reason. A rollout that
was played to its end needs no environment any more, because its end is recorded.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from services.sessions.recording.recorded import RolloutEnd
from services.sessions.session import Session
from services.sessions.session_store import SessionFullError
from services.sessions.tool_rollout import CANNOT_BE_REBUILT, Limits, ToolRollout, Tools, play
from services.sessions.tools.environment_state import EnvironmentState
from services.sessions.tools.tool_answer import ListResult
from services.sessions.tools.tool_errors import ToolLostError
from shared.messages import PlayedEnvironment, PromptGroup, with_observation
from shared.turns import ChatMessage, TurnRefusedError, as_conversation


class Environment(Protocol):
    """The environment of one rollout: a Python object in a process of its own, or a session of an OpenEnv server."""

    @property
    def is_over(self) -> bool:
        """Whether the rollout ends, because the environment takes no further calls."""
        ...

    def has(self, name: str) -> bool:
        """Whether the environment has a tool of this name."""
        ...

    async def reset(self, row: Mapping[str, Any], *, rollout_id: str, group_id: str) -> str:
        """Begin a rollout for a row of the data set; return the text to append to the prompt.

        Raises:
            ToolLostError: The environment could not be reset, and cannot be used.
        """
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str | ListResult:
        """Call a tool; return its result: text, or a ListResult for a list. Calls are made one after the other.

        Raises:
            ToolError: The environment does not have this tool, or the tool failed.
            ToolLostError: The call has no result, and the environment cannot be used any more.
        """
        ...

    async def state(self) -> EnvironmentState:
        """Return the environment's public attributes, for reward functions. Raises ToolLostError if this fails."""
        ...

    async def reward(self) -> float | None:
        """Return the environment's own reward, or None if it gives none. Raises ToolLostError if this fails."""
        ...


class Environments(Protocol):
    """Starts an environment of one type for each rollout of a run."""

    @property
    def name(self) -> str:
        """The name of the environments' type. The reward that they give has the same name."""
        ...

    @property
    def has_reward(self) -> bool:
        """Whether an environment gives a reward of its own, besides the run's reward functions."""
        ...

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        """The JSON schemas of an environment's tools, in OpenAI's format."""
        ...

    def started(self) -> AbstractAsyncContextManager[Environment]:
        """Start an environment for one rollout, and end it with the block. Waits while too many environments exist.

        Raises:
            ToolLostError: No environment can be started.
        """
        ...


class _ToolsOfRollout:
    """The tools that the policy may call in one rollout: the tools of its environment, and the tools of the run."""

    def __init__(self, tools: Tools, environment: Environment, schemas: Sequence[dict[str, Any]]) -> None:
        self.schemas = [*tools.schemas, *schemas]
        self._tools = tools
        self._environment = environment

    @property
    def is_over(self) -> bool:
        """Whether the environment takes no further calls, so that the rollout ends."""
        return self._environment.is_over

    def keeps_state(self, name: str) -> bool:
        """Whether the tool is the environment's, or a tool of the run that keeps state."""
        return self._environment.has(name) or self._tools.keeps_state(name)

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call the environment's tool of this name, or else the run's, and return its result."""
        return await (self._environment if self._environment.has(name) else self._tools).call(name, arguments)


async def play_in_environment(
    session: Session, prompt: PromptGroup, *, environments: Environments, tools: Tools, limits: Limits
) -> ToolRollout:
    """Play one rollout in a new environment. Turns that the session has recorded are not sampled again.

    A rollout that cannot be finished has the reason in ``lost``.

    Raises:
        TurnRefusedError: The model cannot take the prompt, to which ``reset`` added no text.
        GroupTakenError: Another replica plays the rollout.
    """
    if (end := session.recording.end) is not None:
        return ToolRollout(end.completion, end.num_calls, end.num_failed, environment=end.environment)
    rollout, played = ToolRollout(), PlayedEnvironment(environments.name, environments.has_reward)
    observation = ""
    try:
        async with environments.started() as environment:
            observation = await environment.reset(
                {**prompt.columns, "prompt": prompt.prompt}, rollout_id=session.session_id, group_id=prompt.group_id
            )
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
