"""Sessions that live through many pushes: every sampled token is of the policy version that its row names."""

import asyncio

import numpy as np
import pytest
import torch

from services.sessions.recording.recorded import Entry
from services.sessions.session import Session
from services.sessions.turn_client import TurnClient, turn_http_client
from shared.arrays import unpack_ids, unpack_logprobs
from shared.messages import Row
from shared.redis.redis_connection import Redis
from shared.service.tls import PeerTls
from shared.turns import ChatMessage
from tests.generator_contract.implementations import INTERNAL_KEY, Implementation
from tests.generator_contract.played_trainer import PlayedTrainer
from tests.weights.spans import MAX_DIFFERENCE

pytestmark = pytest.mark.timeout(1800)

NUM_SESSIONS, NUM_TURNS, TOKENS_A_TURN = 4, 10, 6


@pytest.fixture
def run_options() -> dict[str, object]:
    """Return a tool; runs without one need no turns."""
    return {"tools": ["tools:add"]}


class Pushed:
    """The version that was pushed last, and the turns that sessions have taken."""

    def __init__(self) -> None:
        self.version = 0
        self.num_turns = [0] * NUM_SESSIONS
        self._changed = asyncio.Condition()

    async def reach(self, *, version: int) -> None:
        """Wait for a version."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)

    async def until_turns(self, number: int) -> None:
        """Wait until every session has taken this many turns."""
        async with self._changed:
            await self._changed.wait_for(lambda: min(self.num_turns) >= number)

    async def note(self, *, version: int | None = None, session: int | None = None) -> None:
        """Note a pushed version, or a turn of a session."""
        async with self._changed:
            if version is not None:
                self.version = version
            if session is not None:
                self.num_turns[session] += 1
            self._changed.notify_all()


async def play(session: Session, pushed: Pushed, *, number: int, pushes_a_turn: int) -> None:
    """Take one turn after every few pushes. A turn begins with a push, so that some are crossed by the next one."""
    messages: list[ChatMessage] = [{"role": "user", "content": "1"}]
    for turn in range(NUM_TURNS):
        await pushed.reach(version=1 + turn * pushes_a_turn + number * pushes_a_turn // NUM_SESSIONS)
        sampled = await session.turn(messages, [], max_tokens=TOKENS_A_TURN)
        messages += [sampled.message, {"role": "tool", "content": "2", "tool_call_id": "none"}]
        await pushed.note(session=number)


def check(row: Row, trainer: PlayedTrainer, *, num_pushes: int) -> float:
    """Assert that the spans cover the sampled tokens, and return the largest difference of a logprob in nats."""
    ids = torch.tensor(unpack_ids(row.token_ids).astype(np.int64))
    places = np.flatnonzero(np.frombuffer(row.loss_mask, np.uint8))
    logprobs = unpack_logprobs(row.logprobs)
    assert len(places) == len(logprobs)
    edges = [0]
    worst = 0.0
    for span in row.version_spans:
        assert span.start == edges[-1] < span.end, row.version_spans
        edges.append(span.end)
        assert span.incarnation == trainer.incarnation
        of_span = places[span.start : span.end]
        with torch.no_grad():
            logits = trainer.policy(span.policy_version)(ids[None]).logits[0].double()
        expected = torch.log_softmax(logits, dim=-1)[of_span - 1, ids[of_span]].numpy()
        worst = max(worst, float(np.abs(logprobs[span.start : span.end] - expected).max()))
    assert edges[-1] == len(places), row.version_spans
    versions = [span.policy_version for span in row.version_spans]
    assert versions == sorted(versions)
    assert versions[-1] - versions[0] >= num_pushes * (NUM_TURNS - 2) // NUM_TURNS
    return worst


@pytest.mark.parametrize("num_pushes", [20, pytest.param(130, marks=pytest.mark.long)])
async def test_every_token_of_a_session_is_of_the_version_that_its_row_names(
    trainer: PlayedTrainer, redis: Redis, implementation: Implementation, num_pushes: int
) -> None:
    pushed, pushes_a_turn = Pushed(), num_pushes // NUM_TURNS

    async def record(_: int, entry: Entry) -> None:
        """Sessions keep what was recorded themselves; Redis is not of interest here."""

    async def push_all() -> None:
        for version in range(1, num_pushes + 1):
            await pushed.until_turns((version - 1) // pushes_a_turn - 1)
            await trainer.push(version)
            await pushed.note(version=version)

    async with turn_http_client(internal_key=INTERNAL_KEY, peers=PeerTls()) as http:
        generators = TurnClient(redis, keys=trainer.keys, http=http)
        sessions = [
            Session(f"00000000-{number}", run_id=trainer.run_id, generators=generators, record=record)
            for number in range(NUM_SESSIONS)
        ]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(push_all(), name="push all versions")
            for number, session in enumerate(sessions):
                playing = play(session, pushed, number=number, pushes_a_turn=pushes_a_turn)
                tasks.create_task(playing, name=f"session {number}")

    rows = [row for session in sessions for row in session.recording.rows()]
    assert len(rows) == NUM_SESSIONS, "a session that continues its history has one row"
    differences = [check(row, trainer, num_pushes=num_pushes) for row in rows]
    assert len({span.policy_version for row in rows for span in row.version_spans}) >= 2 * NUM_TURNS - 4
    if implementation.name == "vllm":  # the simulated generator has logprobs, but no model
        assert max(differences) < MAX_DIFFERENCE
