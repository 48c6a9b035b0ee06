"""Requests that are repeated, at the same time or later, and callers that go away."""

import asyncio

import pytest

from services.sessions.recording.recorded import Entry
from services.sessions.session import Session
from shared.turns import SampledTurn, TurnRefusedError, TurnRequest
from tests.sessions.scripted import ScriptedGenerators, answer, assistant, user

pytestmark = pytest.mark.unit

QUESTION = [user("2+2?")]


class SlowGenerators(ScriptedGenerators):
    """Generators that answer when the test lets them."""

    def __init__(self) -> None:
        super().__init__(lambda request: answer(request, assistant("4")))
        self.may_answer = asyncio.Event()

    async def sample(self, request: TurnRequest, *, routing_key: str) -> SampledTurn:
        turn = await super().sample(request, routing_key=routing_key)
        await self.may_answer.wait()
        return turn


@pytest.fixture
def generators() -> SlowGenerators:
    return SlowGenerators()


@pytest.fixture
def entries() -> list[Entry]:
    return []


@pytest.fixture
def session(generators: SlowGenerators, entries: list[Entry]) -> Session:
    async def record(number: int, entry: Entry) -> None:
        assert number == len(entries)
        await asyncio.sleep(0)
        entries.append(entry)

    return Session("00000000-0", run_id="run-test", generators=generators, record=record)


async def test_a_request_that_is_repeated_while_it_is_under_way_is_sampled_once(
    session: Session, generators: SlowGenerators
) -> None:
    asking = [asyncio.create_task(session.turn(QUESTION, [])) for _ in range(3)]
    await asyncio.sleep(0.01)
    generators.may_answer.set()
    first, *others = await asyncio.gather(*asking)
    assert others == [first, first]
    assert await session.turn(QUESTION, []) == first
    assert len(generators.requests) == 1
    assert len(session.recording.rows()) == 1


async def test_another_body_is_sampled(session: Session, generators: SlowGenerators) -> None:
    generators.may_answer.set()
    await asyncio.gather(
        session.turn(QUESTION, []), session.turn(QUESTION, [], max_tokens=3), session.turn(QUESTION, [{"name": "f"}])
    )
    assert len(generators.requests) == 3
    assert len(session.recording.rows()) == 3


async def test_a_turn_whose_client_went_away_is_recorded_and_answers_the_repeated_request(
    session: Session, generators: SlowGenerators, entries: list[Entry]
) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await session.turn(QUESTION, [])
    generators.may_answer.set()
    assert (await session.turn(QUESTION, [])).message == assistant("4")
    assert len(generators.requests) == len(entries) == 1


async def test_a_turn_that_failed_may_be_asked_for_again(session: Session, generators: SlowGenerators) -> None:
    generators.may_answer.set()
    policy = generators.policy

    def refuse(_: TurnRequest) -> SampledTurn:
        raise TurnRefusedError("full", kind="context_length")

    generators.policy = refuse
    with pytest.raises(TurnRefusedError):
        await session.turn(QUESTION, [])
    generators.policy = policy
    assert (await session.turn(QUESTION, [])).message == assistant("4")


async def test_malformed_messages_are_refused_and_reach_no_generator(
    session: Session, generators: SlowGenerators
) -> None:
    with pytest.raises(TurnRefusedError, match="tool_calls") as refused:
        await session.turn([*QUESTION, {"role": "assistant", "tool_calls": 3}], [])
    assert refused.value.kind == "malformed"
    assert generators.requests == []


async def test_recorded_tokens_are_counted_and_others_are_estimated(
    session: Session, generators: SlowGenerators, entries: list[Entry]
) -> None:
    generators.may_answer.set()
    # {"role":"user","content":"2+2?"} has 32 bytes, {"name":"f"} 12, and the message of "Sure?" 33.
    assert session.estimated_tokens(QUESTION, []) == 8
    assert session.estimated_tokens(QUESTION, [{"name": "f"}]) == 11
    turn = await session.turn(QUESTION, [])
    num_recorded = (len(turn.appended_ids) + len(turn.token_ids)) // 4
    assert session.estimated_tokens([*QUESTION, assistant("4"), user("Sure?")], []) == num_recorded + 9
    with pytest.raises(TurnRefusedError, match="tool_calls"):
        session.estimated_tokens([*QUESTION, {"role": "assistant", "tool_calls": 3}], [])
    assert (len(generators.requests), len(entries)) == (1, 1)


async def test_close_ends_the_turns_under_way(session: Session, entries: list[Entry]) -> None:
    asking = asyncio.create_task(session.turn(QUESTION, []))
    await asyncio.sleep(0.01)
    await session.close()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert entries == []
