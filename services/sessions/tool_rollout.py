"""Plays one rollout with tools: TRL's loop, in which the policy's tool calls are run and their results appended.

    turn --> no tool calls -----------------------------------> the rollout ends
         --> tool calls --> all of them at once --> results --> turn --> ...

A turn is one assistant message. The rollout also ends after ``max_iterations`` turns with results, and when its
environment is over. If the results leave no room for another turn, they are dropped, and the rollout ends with the
calls. If a tool raises an error, the model gets the error's text.

A lost rollout is not scored and not trained. The rollout is lost, with the reason, if a tool call has no result, for
example because its worker died. It is also lost if a turn after the first is refused for another reason than length. If
the first turn is refused, the prompt is at fault, and TurnRefusedError is raised.

If another replica has begun the rollout, its recorded calls are not made again, except calls of tools that keep state,
because the state was lost with that replica. If such a call has another result than the recorded one, the rollout is
lost.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from services.sessions.recording.recorded import ToolResults
from services.sessions.session import Session
from services.sessions.session_store import SessionFullError
from services.sessions.tools.tool_answer import ListResult
from services.sessions.tools.tool_errors import ToolError, ToolLostError
from shared.arrays import ID_DTYPE
from shared.message_invariants import is_data
from shared.messages import RETURNED_LIST, PlayedEnvironment
from shared.turns import ChatMessage, TurnRefusedError

_MAX_DEPTH = 100
"""Deepest nesting of a call's arguments, which are encoded again on their way to the tool."""
CANNOT_BE_REBUILT = "its environment was lost with the replica that played it, and could not be rebuilt"


class Tools(Protocol):
    """The tools that the policy may call in a rollout: the run's tools and, if it has one, its environment's tools."""

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        """JSON schemas of the tools, in OpenAI's format."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the rollout ends after the present results, because its environment takes no further calls."""
        ...

    def keeps_state(self, name: str) -> bool:
        """Whether the result of a tool depends on the rollout's earlier calls."""
        ...

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool and return its result.

        Raises:
            ToolError: The tool raised an exception. The model gets the message as the result.
            ToolLostError: The call has no result, so the rollout is lost.
        """
        ...


@dataclass(frozen=True)
class Limits:
    """The limits of one rollout.

    Attributes:
        max_iterations: Most turns whose tool calls are run; None for no limit.
        max_completion_length: Most tokens after the prompt, tool results included.
    """

    max_iterations: int | None
    max_completion_length: int


@dataclass
class ToolRollout:
    """The result of playing a rollout: its messages, the counts of its tool calls, and why it was lost, if it was.

    Attributes:
        completion: The messages after the prompt.
        lost: Why the rollout could not be played to its end; empty if it was.
        environment: The environment that it was played in, if it was played in one.
    """

    completion: list[ChatMessage] = field(default_factory=list[ChatMessage])
    num_calls: int = 0
    num_failed: int = 0
    lost: str = ""
    environment: PlayedEnvironment | None = None


async def play(session: Session, prompt: Sequence[ChatMessage], *, tools: Tools, limits: Limits) -> ToolRollout:
    """Play one rollout: sample a turn, run its tool calls, append the results, and repeat until the rollout ends.

    Turns that the session has recorded, perhaps in another replica, are not sampled again. A rollout that cannot be
    finished has the reason in ``lost``.

    Raises:
        TurnRefusedError: The model cannot take the prompt.
        GroupTakenError: Another replica plays the rollout.
    """
    rollout = ToolRollout()
    try:
        await _play(session, prompt, rollout, tools=tools, limits=limits)
    except (ToolLostError, SessionFullError) as error:
        rollout.lost = str(error)
    return rollout


async def _play(
    session: Session, prompt: Sequence[ChatMessage], rollout: ToolRollout, *, tools: Tools, limits: Limits
) -> None:
    if session.recording.num_entries and not session.is_recorded(
        prompt, tools.schemas, max_tokens=limits.max_completion_length
    ):
        rollout.lost = "its recorded turns are of other tools: the run's tools were changed while it was played"
        return
    turn = await session.turn(prompt, tools.schemas, max_tokens=limits.max_completion_length)
    max_row_tokens = len(turn.appended_ids) // ID_DTYPE.itemsize + limits.max_completion_length
    num_turns = 1
    while True:
        rollout.completion.append(turn.message)
        calls: list[Any] = turn.message.get("tool_calls") or []
        may_go_on = limits.max_iterations is None or num_turns <= limits.max_iterations
        if not calls or not may_go_on or turn.finish_reason == "length":
            return
        recorded = session.recording.tool_results(num_turns - 1)
        if recorded is not None:
            await _run_again(calls, recorded, tools=tools)
        results = recorded or await _run(calls, turn=num_turns - 1, tools=tools)
        rollout.num_calls += len(calls)
        rollout.num_failed += results.num_failed
        if recorded is None:
            await session.record(results)
        if results.is_last:
            rollout.completion += results.messages
            return
        try:
            conversation = [*prompt, *map(_for_model, [*rollout.completion, *results.messages])]
            turn = await session.turn(conversation, tools.schemas, max_row_tokens=max_row_tokens)
        except TurnRefusedError as refusal:
            if refusal.kind != "context_length":
                rollout.lost = f"its turn {num_turns + 1} was refused: {refusal}"
            return
        rollout.completion += results.messages
        num_turns += 1


async def _run(calls: Sequence[Any], *, turn: int, tools: Tools) -> ToolResults:
    """Run a turn's tool calls at the same time.

    Raises:
        ToolLostError: One of them has no result; the others are cancelled.
    """
    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(_result(call, tools), name="tool call") for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    results = [task.result() for task in tasks]
    messages = [message for message, _ in results]
    return ToolResults(turn, messages, sum(failed for _, failed in results), tools.is_over)


async def _run_again(calls: Sequence[Any], recorded: ToolResults, *, tools: Tools) -> None:
    """Repeat the recorded calls of tools that keep state, so that the tools reach the state they had after the turn.

    Raises:
        ToolLostError: A repeated call has no result, or not the recorded one.
    """
    for call, before in zip(calls, recorded.messages, strict=True):
        name = str(call["function"]["name"])
        if tools.keeps_state(name) and (await _result(call, tools))[0]["content"] != before["content"]:
            raise ToolLostError(
                f"{CANNOT_BE_REBUILT}: {name}, called again with the recorded arguments, had another result"
            )


async def _result(call: Any, tools: Tools) -> tuple[ChatMessage, bool]:
    """Make a tool call. Return the tool message with its result, as TRL writes it, and whether the call failed."""
    name = str(call["function"]["name"])
    message: ChatMessage = {"role": "tool", "name": name}
    if "id" in call:
        message["tool_call_id"] = call["id"]
    try:
        result = await tools.call(name, _arguments(call))
        content, failed = str(result), False
        if isinstance(result, ListResult):
            message[RETURNED_LIST] = result.items
    except ToolError as error:
        content, failed = str({"error": str(error)}), True
    return message | {"content": content}, failed


def _for_model(message: ChatMessage) -> ChatMessage:
    """Return a message without the list that a tool returned, which only reward functions see."""
    return {name: value for name, value in message.items() if name != RETURNED_LIST}


def _arguments(call: Any) -> dict[str, Any]:
    try:
        arguments: Any = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ToolError("the arguments are not a JSON object")
    if not is_data(arguments, max_depth=_MAX_DEPTH):
        raise ToolError(f"the arguments are nested deeper than {_MAX_DEPTH} levels")
    return cast("dict[str, Any]", arguments)
