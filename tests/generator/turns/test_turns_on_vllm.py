"""Two turns of a conversation on a real engine: the second continues exactly the tokens of the first."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.generator.engine.engine import Engine
from services.generator.metrics import GeneratorMetrics
from services.generator.turns.chat_format import ModelChatFormat, load_tokenizer
from services.generator.turns.turn_sampler import TurnSampler
from shared.arrays import Ids, unpack_ids, unpack_logprobs
from shared.errors import MessageError
from shared.lineage import LineageVersion
from shared.messages import VersionSpan
from shared.run_options.run_config import RunConfig
from shared.turns import ChatMessage, SampledTurn, TurnRefusedError, TurnRequest
from tests.tiny_model import CHARACTERS, EOS_TOKEN_ID, SPECIAL, VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.vllm]

TEMPLATE = (
    "{% if tools %}T{% endif %}{% for m in messages %}{{ m.role[0] }}{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
QUESTION: ChatMessage = {"role": "user", "content": "1+1="}
RESULT: ChatMessage = {"role": "tool", "content": "2"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class OpenGate:
    held_version = LineageVersion(0, 0)

    async def wait_open(self, required: LineageVersion) -> None:
        assert self.held_version.satisfies(required)


def ids_of(text: str) -> list[int]:
    """Return the ids of characters; ``.`` is the end of sequence."""
    return [EOS_TOKEN_ID if letter == "." else len(SPECIAL) + CHARACTERS.index(letter) for letter in text]


@pytest.fixture
def sampler(engine: Engine, tiny_model: Path) -> TurnSampler:
    config = RunConfig(
        model=str(tiny_model), dataset_name="/x.jsonl", reward_funcs=["accuracy_reward"], max_completion_length=30,
        temperature=0.7,
    )  # fmt: skip

    tokenizer = load_tokenizer(str(tiny_model), None)
    tokenizer.chat_template = TEMPLATE
    return TurnSampler(
        engine,
        run_id="run-1",
        config=config,
        gate=OpenGate(),
        required_version=lambda: LineageVersion(0, 0),
        chat_format=ModelChatFormat(tokenizer, tool_call_parser="hermes"),
        metrics=GeneratorMetrics(),
    )


async def sample(sampler: TurnSampler, request: TurnRequest) -> SampledTurn:
    (turn,) = await sampler.sample(request)
    assert isinstance(turn, SampledTurn)
    return turn


async def test_the_second_turn_continues_the_tokens_of_the_first(sampler: TurnSampler, tiny_model: Path) -> None:
    first = await sample(sampler, TurnRequest("run-1", "r1", [QUESTION], TOOLS, max_tokens=20))
    assert unpack_ids(first.appended_ids).tolist() == ids_of("Tu1+1=.a")
    sampled = unpack_ids(first.token_ids).tolist()
    assert 1 <= len(sampled) <= 20
    is_whole = sampled[-1] == EOS_TOKEN_ID
    assert first.finish_reason == ("stop" if is_whole else "length")

    recorded = first.appended_ids + first.token_ids
    second = await sample(
        sampler,
        TurnRequest(
            "run-1", "r2", [QUESTION, first.message, RESULT], TOOLS, recorded_ids=recorded, num_recorded_messages=2
        ),
    )
    assert unpack_ids(second.appended_ids).tolist() == ids_of("t2.a" if is_whole else ".t2.a")
    row = unpack_ids(recorded + second.appended_ids + second.token_ids)
    for turn, start in ((first, len(ids_of("Tu1+1=.a"))), (second, len(row) - len(unpack_ids(second.token_ids)))):
        check_logprobs(turn, row, start, tiny_model)


def check_logprobs(turn: SampledTurn, row: Ids, start: int, path: Path) -> None:
    """Compare a turn's logprobs with those that transformers computes for the whole row."""
    num_sampled = len(unpack_ids(turn.token_ids))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor(row.astype(np.int64))[None]).logits[0] / 0.7
    places = range(start - 1, start - 1 + num_sampled)
    expected = torch.log_softmax(logits, dim=-1)[places, row[start : start + num_sampled].astype(np.int64)]
    assert np.abs(unpack_logprobs(turn.logprobs) - expected.numpy()).max() < 1e-4
    assert turn.version_spans == (VersionSpan(0, 0, num_sampled),)
    assert "<eos>" not in turn.message["content"]


async def test_a_turn_gets_what_is_left_of_the_context_and_none_is_left_after_it(sampler: TurnSampler) -> None:
    long = TurnRequest("run-1", "r1", [{"role": "user", "content": "a" * 122}])  # 125 of 128 tokens with its frame
    assert len(unpack_ids((await sample(sampler, long)).token_ids)) <= 3
    with pytest.raises(TurnRefusedError, match="has 128 tokens, and the context of the model 128") as caught:
        await sampler.sample(TurnRequest("run-1", "r1", [{"role": "user", "content": "a" * 125}]))
    assert caught.value.kind == "context_length"


async def test_recorded_ids_that_the_model_does_not_have_are_refused(sampler: TurnSampler) -> None:
    foreign = np.array([VOCAB_SIZE, EOS_TOKEN_ID], dtype="<i4").tobytes()
    answer: ChatMessage = {"role": "assistant", "content": "x"}
    with pytest.raises(MessageError, match="out of vocabulary"):
        await sampler.sample(
            TurnRequest("run-1", "r1", [QUESTION, answer, RESULT], recorded_ids=foreign, num_recorded_messages=2)
        )


async def test_the_turns_of_one_request_are_sampled_independently(sampler: TurnSampler, tiny_model: Path) -> None:
    turns = await sampler.sample(TurnRequest("run-1", "r1", [QUESTION], TOOLS, max_tokens=20, n=8))
    appended = ids_of("Tu1+1=.a")
    rows: set[bytes] = set()
    for turn in turns:
        assert isinstance(turn, SampledTurn)
        assert unpack_ids(turn.appended_ids).tolist() == appended
        check_logprobs(turn, unpack_ids(turn.appended_ids + turn.token_ids), len(appended), tiny_model)
        rows.add(turn.token_ids)
    assert len(turns) == 8
    assert len(rows) > 1


async def test_a_cancelled_turn_leaves_nothing_in_the_engine(engine: Engine, sampler: TurnSampler) -> None:
    turns = [
        asyncio.create_task(sampler.sample(TurnRequest("run-1", "same", [QUESTION])), name=f"turn {index}")
        for index in range(2)
    ]
    async with asyncio.timeout(120):
        while engine.num_unfinished < 2 and not any(turn.done() for turn in turns):  # noqa: ASYNC110  no event for it
            await asyncio.sleep(0)
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)
    async with asyncio.timeout(120):
        while engine.num_unfinished:  # noqa: ASYNC110  no event for it
            await asyncio.sleep(0.01)
