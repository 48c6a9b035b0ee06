"""Plays one rollout by running the user's agent program, which asks for the policy's turns over HTTP.

    session opened --> base URL, key --> program --turns--> ... --> it ends, with a reward or without one

A turn is one assistant message. The rollout is lost (not scored and not trained), with the reason, if the program ends
with an error or without a turn, or asks for no new turn for too long. There is one exception: many programs end with
an error when a turn is refused because the conversation has grown too long. The messages until then are scored.

The program is started again by a replica that takes the rollout over. As long as it sends the recorded requests again,
it gets the recorded turns.
"""

import asyncio
from typing import Any

from services.sessions.agents.agent_programs import AgentFailedError, AgentProgram
from services.sessions.open_session import OpenSession
from services.sessions.open_sessions import OpenSessions
from services.sessions.recording.recorded import RolloutEnd
from services.sessions.session import Session
from services.sessions.session_store import SessionFullError
from services.sessions.tool_rollout import ToolRollout
from shared.messages import PlayedEnvironment, PromptGroup

_REWARD_AFTER_END_S = 2.0
"""How long a program that has ended its session, and has reported no reward, may take to return one."""


class AgentSilentError(Exception):
    """An agent program was silent for too long: it neither ended nor asked for a new turn."""


class AgentPlayer:
    """Plays the rollouts of one run with its agent program.

    Args:
        program: The run's agent program, a Python function or a program behind a URL.
        sessions: Gives each rollout's session a URL and a key.
        timeout_s: Longest time without a new turn or a request under way, in seconds; then the rollout is lost.
        max_completion_length: Most tokens of the conversation after its prompt.
    """

    def __init__(
        self, program: AgentProgram, sessions: OpenSessions, *, timeout_s: float, max_completion_length: int
    ) -> None:
        self._program = program
        self._sessions = sessions
        self._timeout_s = timeout_s
        self._max_completion_length = max_completion_length

    async def play(self, session: Session, prompt: PromptGroup) -> ToolRollout:
        """Run the agent program for one rollout. If the program fails, the returned rollout has the reason in ``lost``.

        Raises:
            GroupTakenError: Another replica plays the rollout.
            StateLostError: The run's streams are gone.
            UnavailableError: Redis did not answer.
        """
        if (end := session.recording.end) is not None:
            return ToolRollout(end.completion, end.num_calls, end.num_failed, environment=end.environment)
        rollout = ToolRollout(environment=PlayedEnvironment(self._program.name, has_reward=True))
        with self._sessions.opened(
            session, run_id=prompt.run_id, max_completion_length=self._max_completion_length
        ) as opened:
            try:
                await _until_over(opened, prompt, program=self._program, timeout_s=self._timeout_s)
            except AgentFailedError as error:
                rollout.lost = "" if opened.is_full else str(error)
            except (AgentSilentError, SessionFullError) as error:
                rollout.lost = str(error)
        await session.close()  # a turn that is not whole when the program ends is not part of the rollout
        rollout.completion, rollout.num_calls = session.recording.completion(), session.recording.num_calls
        if not rollout.lost and not session.recording.num_turns:
            why = f": its last request was refused: {opened.refused}" if opened.refused else ""
            rollout.lost = f"{self._program.name} ended without a turn{why}"
        if not rollout.lost:
            await self._end(session, rollout, opened.reward)
        return rollout

    async def _end(self, session: Session, rollout: ToolRollout, reward: float | None) -> None:
        """Record the end of a rollout, so that its program is not started again. Without room for it, set ``lost``."""
        reported = PlayedEnvironment(self._program.name, has_reward=True, reward=reward)
        try:
            await session.record(RolloutEnd(rollout.completion, rollout.num_calls, 0, reported))
        except SessionFullError as error:
            rollout.lost = str(error)
        else:
            rollout.environment = reported


async def _until_over(opened: OpenSession, prompt: PromptGroup, *, program: AgentProgram, timeout_s: float) -> None:
    """Run the program until it ends, the session ends, or the program has been silent for ``timeout_s`` seconds.

    Raises:
        AgentFailedError: The program ended with an error.
        AgentSilentError: The program neither ended nor asked for a new turn in this time.
        HeadraceError: The session cannot go on.
    """
    running = asyncio.create_task(program.run(opened, prompt), name=f"agent of {opened.session.session_id}")
    silence = asyncio.create_task(opened.until_silent(timeout_s), name=f"silence of {opened.session.session_id}")
    try:
        ends: list[asyncio.Future[Any]] = [running, silence, opened.over]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if opened.over.done():
            opened.over.result()
            if opened.reward is None:  # a program may end its session and then return its reward
                await asyncio.wait({running}, timeout=_REWARD_AFTER_END_S)
            if running.done() and running.exception() is None and opened.reward is None:
                opened.reward = running.result()
        elif running.done():
            reward = running.result()
            opened.reward = opened.reward if reward is None else reward
        else:
            raise AgentSilentError(f"{program.name} neither ended nor asked for a new turn for {timeout_s:g} s")
    finally:
        running.cancel()
        silence.cancel()
        await asyncio.gather(running, silence, return_exceptions=True)
