"""Rollouts of agent programs: how they end, what they leave, and what is played again after a takeover."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.sessions import agent_rollout, open_session
from services.sessions.agent_rollout import AgentPlayer
from services.sessions.agents.agent_programs import AgentFailedError
from services.sessions.open_session import OpenSession, SessionOverError
from services.sessions.open_sessions import OpenSessions
from services.sessions.recording.recorded import Entry, RecordedTurn, RolloutEnd
from services.sessions.session import Session
from services.sessions.session_store import GroupTakenError, SessionFullError
from services.sessions.tool_rollout import ToolRollout
from shared.messages import PlayedEnvironment, PromptGroup
from shared.turns import ChatMessage, SampledTurn, TurnRefusedError, TurnRequest
from tests.groups import prompt_group
from tests.sessions.scripted import ScriptedGenerators, answer, assistant, call, sampled, turns_of, user

pytestmark = pytest.mark.unit

QUESTION = [user("2+2?")]
Play = Callable[[OpenSession], Awaitable[float | None]]


class Program:
    """An agent program that is a function of the test."""

    name = "my_agent:run"

    def __init__(self, play: Play) -> None:
        self.play = play
        self.num_started = 0

    async def run(self, client: Any, prompt: PromptGroup) -> float | None:
        self.num_started += 1
        assert prompt.columns == {"answer": "4"}
        client.begin()
        return await self.play(client)


async def ask(client: OpenSession, messages: list[ChatMessage], **more: Any) -> ChatMessage:
    options: dict[str, Any] = {"max_tokens": 0, "seed": None, **more}
    turn = await client.turn(messages, options.pop("tools", []), **options)
    return turn.message


class Rig:
    """One rollout's session, with entries that outlive it."""

    def __init__(self, policy: Callable[[TurnRequest], ChatMessage | SampledTurn]) -> None:
        self.generators = ScriptedGenerators(policy)
        self.entries: list[Entry] = []
        self.failure: Exception | None = None
        self.sessions = OpenSessions(url="http://replica:1", max_sessions=1)

    def session(self) -> Session:
        async def record(number: int, entry: Entry) -> None:
            if self.failure is not None:
                raise self.failure
            assert number == len(self.entries)
            self.entries.append(entry)

        return Session(
            "00000000-0", run_id="run-test", generators=self.generators, record=record, entries=tuple(self.entries)
        )

    async def played(self, program: Program, *, timeout_s: float = 120.0) -> tuple[ToolRollout, Session]:
        player = AgentPlayer(program, self.sessions, timeout_s=timeout_s, max_completion_length=20)
        session = self.session()
        group = msgspec.structs.replace(prompt_group(), columns={"answer": "4"})
        try:
            return await player.play(session, group), session
        finally:
            await session.close()


async def test_the_return_value_is_the_reward_and_the_last_conversation_is_the_completion() -> None:
    async def play(client: OpenSession) -> float:
        said = await ask(client, QUESTION)
        await ask(client, [*QUESTION, said, user("Sure?")])
        return 0.5

    rig = Rig(turns_of(assistant("", call("add", "{}")), assistant("4")))
    rollout, session = await rig.played(Program(play))
    assert rollout.lost == ""
    assert rollout.completion == [assistant("", call("add", "{}")), user("Sure?"), assistant("4")]
    assert rollout.num_calls == 1
    assert rollout.environment == PlayedEnvironment("my_agent:run", has_reward=True, reward=0.5)
    assert len(session.recording.rows()) == 1
    assert isinstance(rig.entries[-1], RolloutEnd)


async def test_a_reported_reward_counts_if_none_is_returned() -> None:
    async def play(client: OpenSession) -> None:
        await ask(client, QUESTION)
        client.reward = 0.25

    rollout, _ = await Rig(turns_of(assistant("4"))).played(Program(play))
    assert rollout.environment is not None
    assert rollout.environment.reward == 0.25


async def test_a_reward_that_is_returned_after_the_end_of_the_session_counts() -> None:
    async def play(client: OpenSession) -> float:
        await ask(client, QUESTION)
        client.end()
        await asyncio.sleep(0.05)
        return 0.5

    rollout, _ = await Rig(turns_of(assistant("4"))).played(Program(play))
    assert rollout.environment is not None
    assert (rollout.lost, rollout.environment.reward) == ("", 0.5)


async def test_the_program_may_end_its_session_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_rollout, "_REWARD_AFTER_END_S", 0.01)

    async def play(client: OpenSession) -> None:
        await ask(client, QUESTION)
        client.end()
        with pytest.raises(SessionOverError):
            await ask(client, QUESTION)
        await asyncio.Event().wait()

    rollout, _ = await Rig(turns_of(assistant("4"))).played(Program(play))
    assert (rollout.lost, rollout.completion) == ("", [assistant("4")])


async def test_a_rewritten_history_is_a_row_of_its_own_with_masks_as_by_hand() -> None:
    async def play(client: OpenSession) -> None:
        await ask(client, QUESTION)
        await ask(client, [*QUESTION, assistant("In short: 4"), user("And?")])

    def policy(request: TurnRequest) -> SampledTurn:
        if len(request.messages) == 1:
            return sampled(assistant("four"), appended_ids=[1, 2], token_ids=[11, 12])
        return sampled(assistant("5"), appended_ids=[1, 2, 3, 4], token_ids=[21])

    rollout, session = await Rig(policy).played(Program(play))
    first, second = session.recording.rows()
    assert (list(first.loss_mask), list(second.loss_mask)) == ([0, 0, 1, 1], [0, 0, 0, 0, 1])
    assert rollout.completion == [assistant("In short: 4"), user("And?"), assistant("5")]


@pytest.mark.parametrize("num_turns", [0, 1])
async def test_a_program_that_fails_loses_its_rollout_and_its_reward(num_turns: int) -> None:
    async def play(client: OpenSession) -> None:
        for _ in range(num_turns):
            await ask(client, QUESTION)
        client.reward = 1.0
        raise AgentFailedError("my_agent:run ended with ValueError: no")

    rig = Rig(turns_of(assistant("4")))
    rollout, _ = await rig.played(Program(play))
    assert rollout.lost == "my_agent:run ended with ValueError: no"
    assert rollout.environment == PlayedEnvironment("my_agent:run", has_reward=True, reward=None)
    assert not any(isinstance(entry, RolloutEnd) for entry in rig.entries)


async def test_a_program_without_a_turn_loses_its_rollout() -> None:
    async def play(client: OpenSession) -> float:
        return 1.0

    rollout, _ = await Rig(turns_of()).played(Program(play))
    assert rollout.lost == "my_agent:run ended without a turn"


async def test_silence_loses_the_rollout_but_a_turn_that_waits_is_not_silence() -> None:
    async def play(client: OpenSession) -> None:
        asked_at = asyncio.get_running_loop().time()
        await ask(client, QUESTION)
        assert asyncio.get_running_loop().time() - asked_at > 0.4
        await asyncio.Event().wait()

    class Slow(ScriptedGenerators):
        async def sample(self, request: TurnRequest, *, routing_key: str) -> SampledTurn:
            await asyncio.sleep(0.5)
            return await super().sample(request, routing_key=routing_key)

    rig = Rig(turns_of(assistant("4")))
    rig.generators = Slow(turns_of(assistant("4")))
    rollout, session = await rig.played(Program(play), timeout_s=0.2)
    assert rollout.lost == "my_agent:run neither ended nor asked for a new turn for 0.2 s"
    assert session.recording.num_turns == 1


async def test_a_program_that_repeats_what_was_answered_is_silent() -> None:
    async def play(client: OpenSession) -> None:
        while True:
            with contextlib.suppress(TurnRefusedError):
                await ask(client, QUESTION)
                await ask(client, [user("too long")])
            await asyncio.sleep(0.02)

    def policy(request: TurnRequest) -> SampledTurn:
        if request.messages == QUESTION:
            return answer(request, assistant("4"))
        raise TurnRefusedError("no room", kind="context_length")

    async with asyncio.timeout(20):
        rollout, session = await Rig(policy).played(Program(play), timeout_s=0.2)
    assert rollout.lost == "my_agent:run neither ended nor asked for a new turn for 0.2 s"
    assert session.recording.num_turns == 1


async def test_recorded_turns_that_a_restarted_program_reads_again_are_not_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock: Any = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(open_session, "time", clock)
    monkeypatch.setattr(open_session, "_SHORTEST_LOOK_S", 0.01)

    async def play(client: OpenSession) -> float:
        for _ in range(2):  # in two processes, because the worker of the first one died
            messages = QUESTION
            for _ in range(4):
                said = await ask(client, messages)
                messages = [*messages, said, user("And?")]
                clock.now_s += 0.03
                await asyncio.sleep(0.05)  # the silence is looked at meanwhile
        return 1.0

    rig = Rig(turns_of(*(assistant(str(number)) for number in range(4))))
    rollout, _ = await rig.played(Program(play), timeout_s=0.1)
    assert (rollout.lost, len(rig.generators.requests)) == ("", 4)


async def test_an_error_after_the_conversation_became_too_long_ends_the_rollout_without_losing_it() -> None:
    async def play(client: OpenSession) -> None:
        said = await ask(client, QUESTION)
        try:
            await ask(client, [*QUESTION, said, user("And?")])
        except TurnRefusedError as error:
            raise AgentFailedError("my_agent:run ended with BadRequestError") from error

    def policy(request: TurnRequest) -> SampledTurn:
        if len(request.messages) == 1:
            return answer(request, assistant("4"))
        raise TurnRefusedError("no room", kind="context_length")

    rig = Rig(policy)
    rollout, _ = await rig.played(Program(play))
    assert (rollout.lost, rollout.completion) == ("", [assistant("4")])
    # The first turn is bounded by the run's options. The row may have 20 tokens after the prompt of the first.
    first, second = rig.generators.requests
    (turn,) = [entry.turn for entry in rig.entries if isinstance(entry, RecordedTurn)]
    num_prompt = len(turn.appended_ids) // 4
    assert (first.max_row_tokens, second.max_row_tokens) == (0, num_prompt + 20)


async def test_silence_after_the_conversation_became_too_long_loses_the_rollout() -> None:
    async def play(client: OpenSession) -> None:
        said = await ask(client, QUESTION)
        with contextlib.suppress(TurnRefusedError):
            await ask(client, [*QUESTION, said, user("And?")])
        await asyncio.Event().wait()

    def policy(request: TurnRequest) -> SampledTurn:
        if len(request.messages) == 1:
            return answer(request, assistant("4"))
        raise TurnRefusedError("no room", kind="context_length")

    rollout, _ = await Rig(policy).played(Program(play), timeout_s=0.2)
    assert "neither ended nor asked for a new turn" in rollout.lost


async def test_a_program_whose_first_request_is_refused_says_why() -> None:
    async def play(client: OpenSession) -> None:
        try:
            await ask(client, QUESTION)
        except TurnRefusedError as error:
            raise AgentFailedError("my_agent:run ended with BadRequestError") from error

    def policy(request: TurnRequest) -> SampledTurn:
        raise TurnRefusedError("the conversation has 9 tokens, and the context 8", kind="context_length")

    rollout, _ = await Rig(policy).played(Program(play))
    assert rollout.lost == (
        "my_agent:run ended without a turn: its last request was refused: "
        "the conversation has 9 tokens, and the context 8"
    )


async def test_an_error_long_after_a_conversation_that_became_too_long_loses_the_rollout() -> None:
    async def play(client: OpenSession) -> None:
        with contextlib.suppress(TurnRefusedError):
            await ask(client, [user("too long")])
        await ask(client, QUESTION)
        raise AgentFailedError("my_agent:run ended with KeyError")

    def policy(request: TurnRequest) -> SampledTurn:
        if request.messages == [user("too long")]:
            raise TurnRefusedError("no room", kind="context_length")
        return answer(request, assistant("4"))

    rollout, _ = await Rig(policy).played(Program(play))
    assert rollout.lost == "my_agent:run ended with KeyError"


@pytest.mark.parametrize("failure", [GroupTakenError("another replica plays it"), SessionFullError("too large")])
async def test_a_session_that_cannot_go_on_ends_the_program(failure: Exception) -> None:
    async def play(client: OpenSession) -> None:
        with pytest.raises(SessionOverError):
            await ask(client, QUESTION)
        await asyncio.Event().wait()

    rig = Rig(turns_of(assistant("4")))
    rig.failure = failure
    if isinstance(failure, GroupTakenError):
        with pytest.raises(GroupTakenError):
            await rig.played(Program(play))
        return
    rollout, _ = await rig.played(Program(play))
    assert rollout.lost == "too large"


async def test_after_a_takeover_the_same_requests_get_the_recorded_turns_until_the_program_says_something_else() -> (
    None
):
    says = iter(["at noon", "at one"])

    async def play(client: OpenSession) -> None:
        said = await ask(client, QUESTION)
        await ask(client, [*QUESTION, said, user(f"Asked {next(says)}.")])
        raise AgentFailedError("the replica dies")

    rig = Rig(turns_of(assistant("4"), assistant("yes")))
    await rig.played(Program(play))
    rollout, session = await rig.played(Program(play))
    assert len(rig.generators.requests) == 3
    assert len(session.recording.rows()) == 2
    assert rollout.completion == [assistant("4"), user("Asked at one."), assistant("yes")]


async def test_a_rollout_whose_end_was_recorded_does_not_start_its_program_again() -> None:
    async def play(client: OpenSession) -> float:
        await ask(client, QUESTION)
        return 1.0

    rig, program = Rig(turns_of(assistant("4"))), Program(play)
    (first, _), (again, _) = await rig.played(program), await rig.played(program)
    assert program.num_started == 1
    assert again == first


async def test_a_turn_that_is_not_whole_when_the_program_ends_is_not_part_of_the_rollout() -> None:
    hangs = asyncio.Event()

    class Hanging(ScriptedGenerators):
        async def sample(self, request: TurnRequest, *, routing_key: str) -> SampledTurn:
            if len(request.messages) > 1:
                hangs.set()
                await asyncio.Event().wait()
            return await super().sample(request, routing_key=routing_key)

    background: list[asyncio.Task[Any]] = []

    async def play(client: OpenSession) -> None:
        said = await ask(client, QUESTION)
        background.append(asyncio.create_task(ask(client, [*QUESTION, said, user("And?")])))
        await hangs.wait()

    rig = Rig(turns_of(assistant("4")))
    rig.generators = Hanging(turns_of(assistant("4")))
    rollout, session = await rig.played(Program(play))
    assert rollout.completion == [assistant("4")]
    assert session.recording.num_turns == 1
    with pytest.raises(SessionOverError, match="before the turn was whole"):
        await background[0]
