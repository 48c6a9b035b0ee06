"""A simulated replica is killed while it samples a turn: another one samples it, and no recorded turn again."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.sessions.recording.recorded import Entry, RecordedTurn
from services.sessions.session import Session
from services.sessions.turn_client import TurnClient, ranked, turn_http_client
from shared.redis.redis_connection import Redis
from shared.service.tls import PeerTls
from shared.turns import ChatMessage
from tests.conftest import RedisServer
from tests.generator_contract.implementations import IMPLEMENTATIONS, INTERNAL_KEY, GeneratorProcess
from tests.generator_contract.played_trainer import a_run

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(IMPLEMENTATIONS[0].name != "simulated", reason="another generator is checked"),
]

SESSION = "00000000-0"
QUESTION: ChatMessage = {"role": "user", "content": "1+1?"}
RESULT: ChatMessage = {"role": "tool", "content": "2", "tool_call_id": "none"}
SHORT, LONG = 4, 100
SLOW = {
    "HEADRACE_SIMULATED_SPEED_UP": "0.2",  # a long turn takes six seconds
    "HEADRACE_SIMULATED_COMPLETION_TOKENS": str(LONG),
    "HEADRACE_SIMULATED_COMPLETION_TOKENS_SIGMA": "0",
}


class AnswerHeads:
    """Notes the heads of answers: a generator sends one before it samples."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def __call__(self, _: httpx.Response) -> None:
        self.begun.set()


def sampled(journal: Path) -> list[tuple[int, str]]:
    """Return the number of each turn that was sampled, and by which replica."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in journal.read_text().splitlines()]
    assert all(row["request"].startswith(f"{SESSION}-") for row in rows)
    return [(row["turn"], row["by"]) for row in rows]


async def test_a_turn_whose_generator_is_killed_is_sampled_by_another_and_the_turns_before_it_are_not(
    lonely: tuple[RedisServer, Redis], model_dir: Path, tmp_path: Path
) -> None:
    server, redis = lonely
    journal = tmp_path / "turns.jsonl"
    more = SLOW | {"HEADRACE_SIMULATED_TURN_JOURNAL": str(journal)}
    simulated = replace(IMPLEMENTATIONS[0], environment=IMPLEMENTATIONS[0].environment | more)
    first, second = ranked(SESSION, ["generator-a", "generator-b"])
    replicas = {
        name: GeneratorProcess(simulated, server.url, name, tmp_path / f"{name}.log") for name in (first, second)
    }
    entries: list[Entry] = []

    async def record(number: int, entry: Entry) -> None:
        assert number == len(entries)
        entries.append(entry)

    try:
        async with a_run(redis, model_dir, simulated, tools=["tools:add"]) as trainer:
            await trainer.until_served_by(*replicas.values())
            assert len((await trainer.push(0)).members) == len(replicas)
            heads = AnswerHeads()
            async with turn_http_client(internal_key=INTERNAL_KEY, peers=PeerTls()) as http:
                http.event_hooks = {"response": [heads]}
                generators = TurnClient(redis, keys=trainer.keys, http=http)
                session = Session(SESSION, run_id=trainer.run_id, generators=generators, record=record)
                answer = await session.turn([QUESTION], [], max_tokens=SHORT)
                assert sampled(journal) == [(0, first)]

                conversation = [QUESTION, answer.message, RESULT]
                heads.begun.clear()
                asking = asyncio.create_task(session.turn(conversation, [], max_tokens=LONG))
                async with asyncio.timeout(120):
                    await heads.begun.wait()
                replicas[first].kill()
                async with asyncio.timeout(240):
                    last = await asking
                assert sampled(journal) == [(0, first), (1, second)]

                # Another replica of the sessions service goes on from what was recorded, and samples nothing.
                again = Session(
                    SESSION, run_id=trainer.run_id, generators=generators, record=record, entries=[*entries]
                )
                assert await again.turn([QUESTION], [], max_tokens=SHORT) == answer
                assert await again.turn(conversation, [], max_tokens=LONG) == last
            assert sampled(journal) == [(0, first), (1, second)]
    finally:
        for replica in replicas.values():
            replica.kill()
    turns = [entry for entry in entries if isinstance(entry, RecordedTurn)]
    assert [turn.continues for turn in turns] == [None, 0]
    (row,) = session.recording.rows()
    assert len(row.sampled_ids()) == SHORT + LONG
