"""Turns of a conversation over HTTP, from any generator."""

import httpx
import msgspec
import pytest

from shared.arrays import unpack_ids
from shared.messages import VersionSpan
from shared.turns import TURN_PATH, SampledTurn, TurnRequest, decode_turn_answer, encode_turn_requests
from tests.generator_contract.implementations import INTERNAL_KEY, GeneratorProcess
from tests.generator_contract.played_trainer import PlayedTrainer

pytestmark = pytest.mark.timeout(600)

QUESTION = {"role": "user", "content": "1 + 1"}


@pytest.fixture
def run_options() -> dict[str, object]:
    """Return a tool; runs without one need no turns."""
    return {"tools": ["tools:add"]}


async def sampled(client: httpx.AsyncClient, *requests: TurnRequest) -> list[tuple[int, SampledTurn]]:
    """Return the turns with the places of their requests, by place."""
    answer = await client.post(TURN_PATH, content=encode_turn_requests(requests))
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/jsonl"), answer.text
    answers = [decode_turn_answer(line) for line in answer.content.splitlines()]
    return sorted(((each.index, each.turn) for each in answers if each.turn is not None), key=lambda each: each[0])


async def test_a_conversation_is_sampled_turn_by_turn(trainer: PlayedTrainer, generator: GeneratorProcess) -> None:
    request = TurnRequest(trainer.run_id, "turn-1", [QUESTION], max_tokens=8)
    async with generator.client(INTERNAL_KEY) as client:
        waiting = await client.post(TURN_PATH, content=encode_turn_requests([request]))
        assert (waiting.status_code, waiting.headers["content-type"]) == (503, "application/problem+json")
        assert "retry-after" in waiting.headers

        await trainer.push(3)
        ((_, first),) = await sampled(client, request)
        num_sampled = len(unpack_ids(first.token_ids))
        assert 1 <= num_sampled <= 8
        assert len(first.logprobs) == len(first.token_ids)
        assert first.version_spans == (VersionSpan(3, 0, num_sampled, trainer.incarnation),)
        assert first.finish_reason in ("stop", "length")
        assert first.message["role"] == "assistant"
        assert unpack_ids(first.appended_ids).size

        follow = msgspec.structs.replace(
            request,
            request_id="turn-2",
            messages=[QUESTION, first.message, QUESTION],
            recorded_ids=first.appended_ids + first.token_ids,
            num_recorded_messages=2,
        )
        answers = await sampled(client, msgspec.structs.replace(request, n=3), follow)
        assert [index for index, _ in answers] == [0, 0, 0, 1]
        for _, turn in answers:
            assert unpack_ids(turn.appended_ids).size
            assert unpack_ids(turn.token_ids).size


async def test_a_turn_that_cannot_be_sampled_is_refused_with_its_kind(
    trainer: PlayedTrainer, generator: GeneratorProcess
) -> None:
    await trainer.push(3)
    too_long = TurnRequest(trainer.run_id, "turn-1", [{"role": "user", "content": "a" * 5000}])
    another = TurnRequest("another-run", "turn-1", [QUESTION])
    async with generator.client(INTERNAL_KEY) as client:
        answer = await client.post(TURN_PATH, content=encode_turn_requests([too_long]))
        (line,) = answer.content.splitlines()
        refusal = decode_turn_answer(line).refusal
        assert refusal is not None
        assert refusal.kind == "context_length"
        for kind, status, body in (("another_run", 409, encode_turn_requests([another])), ("malformed", 422, b"{}")):
            answer = await client.post(TURN_PATH, content=body)
            assert (answer.status_code, answer.json().get("kind")) == (status, kind), answer.text
            assert answer.headers["content-type"] == "application/problem+json"
