"""Sampling options on a real engine: the recorded logprobs are from the distribution after all restrictions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.generator.engine.engine import Engine
from services.generator.rollouts import SampledCompletion
from shared.errors import MessageError
from shared.run_options.run_config import RunConfig
from tests.generator.engine.reference import Reference, of_sampled, only
from tests.generator.test_generation import a_config
from tests.tiny_model import CHARACTERS, EOS_TOKEN_ID, SPECIAL, VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.vllm]

PROMPT = [5, 6, 7]
DIGITS = [len(SPECIAL) + CHARACTERS.index(digit) for digit in "0123456789"]
Restrict = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


async def sample(engine: Engine, config: RunConfig, *, n: int = 8) -> list[SampledCompletion]:
    return await engine.complete(PROMPT, num_completions=n, config=config, request_id="of-a-test")


def spelled(ids: list[int]) -> str:
    """Return the text of token ids without special tokens."""
    return "".join(CHARACTERS[token - len(SPECIAL)] for token in ids if token >= len(SPECIAL))


def unrestricted(logits: torch.Tensor) -> torch.Tensor:
    return logits


def without_a_and_b(logits: torch.Tensor) -> torch.Tensor:
    banned = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    banned[[len(SPECIAL) + CHARACTERS.index(letter) for letter in "ab"]] = True
    return only(logits, ~banned)


def top_k(k: int) -> Restrict:
    return lambda logits: only(logits, logits >= logits.topk(k).values[:, -1:])


def top_p(p: float) -> Restrict:
    def restrict(logits: torch.Tensor) -> torch.Tensor:
        probabilities, order = logits.softmax(-1).sort(descending=True)
        is_in = probabilities.cumsum(-1) - probabilities < p
        return only(logits, torch.zeros_like(is_in).scatter(-1, order, is_in))

    return restrict


def min_p(p: float) -> Restrict:
    def restrict(logits: torch.Tensor) -> torch.Tensor:
        probabilities = logits.softmax(-1)
        return only(logits, probabilities >= p * probabilities.max(-1, keepdim=True).values)

    return restrict


@pytest.mark.parametrize(
    ("options", "restrict"),
    [
        ({}, unrestricted),
        ({"top_k": 5}, top_k(5)),
        ({"top_p": 0.5}, top_p(0.5)),
        ({"min_p": 0.2}, min_p(0.2)),
        ({"generation_kwargs": {"bad_words": ["a", "b"]}}, without_a_and_b),
    ],
    ids=["plain", "top_k", "top_p", "min_p", "bad_words"],
)
async def test_logprobs_are_from_the_restricted_distribution(
    engine: Engine, tiny_model: Path, reference: Reference, options: dict[str, Any], restrict: Restrict
) -> None:
    temperature = 0.8
    for completion in await sample(engine, a_config(tiny_model, temperature=temperature, **options)):
        ids = list(completion.token_ids)
        logits = restrict(reference.logits(PROMPT, ids) / temperature)
        expected = of_sampled(logits, ids)
        assert torch.isfinite(expected).all(), "sampled from outside the restriction"
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-4


async def test_penalised_logprobs_are_from_the_penalised_distribution(
    engine: Engine, tiny_model: Path, reference: Reference
) -> None:
    config = a_config(
        tiny_model,
        repetition_penalty=1.3,
        generation_kwargs={"presence_penalty": 0.5, "frequency_penalty": 0.25},
    )
    for completion in await sample(engine, config, n=4):
        ids = list(completion.token_ids)
        logits = reference.logits(PROMPT, ids).clone()
        for position in range(len(ids)):
            for token in {*PROMPT, *ids[:position]}:
                logit = logits[position, token]
                logits[position, token] = logit / 1.3 if logit > 0 else logit * 1.3
            for token in set(ids[:position]):
                logits[position, token] -= 0.5 + 0.25 * ids[:position].count(token)
        assert (torch.tensor(completion.logprobs) - of_sampled(logits, ids)).abs().max() < 1e-4


async def test_a_stop_string_stays_in_ids_and_text_with_exact_logprobs(
    engine: Engine, tiny_model: Path, reference: Reference
) -> None:
    config = a_config(tiny_model, max_completion_length=60, generation_kwargs={"stop": ["a", "7"]})
    completions = await sample(engine, config, n=24)
    stopped = [one for one in completions if one.text.endswith(("a", "7"))]
    assert stopped, "no completion met a stop string"
    for completion in completions:
        ids = list(completion.token_ids)
        assert completion.text == spelled(ids)
        assert len(completion.logprobs) == len(ids)
        assert completion.spans == [("0", 0, len(ids))]
        assert (torch.tensor(completion.logprobs) - reference.logprobs(PROMPT, ids)).abs().max() < 1e-4
        assert not set(completion.text[:-1]) & {"a", "7"}
    for completion in stopped:
        assert completion.finish_reason == "stop"
        assert completion.token_ids[-1] != EOS_TOKEN_ID


async def test_a_stop_string_of_several_tokens_ends_where_its_last_one_does(engine: Engine, tiny_model: Path) -> None:
    config = a_config(
        tiny_model,
        max_completion_length=40,
        vllm_structured_outputs_regex="[xyz]{3}abc[0-9]{9}",
        generation_kwargs={"stop": ["abc"]},
    )
    for completion in await sample(engine, config):
        assert completion.text[3:] == "abc"
        assert (len(completion.token_ids), completion.finish_reason) == (6, "stop")


async def test_a_stop_token_ends_a_completion(engine: Engine, tiny_model: Path) -> None:
    config = a_config(tiny_model, max_completion_length=60, generation_kwargs={"stop_token_ids": DIGITS})
    completions = await sample(engine, config, n=16)
    assert any(completion.token_ids[-1] in DIGITS for completion in completions)
    for completion in completions:
        assert not set(completion.token_ids[:-1]) & set(DIGITS)
        assert completion.text == spelled(list(completion.token_ids))


STRUCTURES: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"regex": "[0-9]{2}=[a-c]"}, lambda text: len(text) == 4 and text[:2].isdigit() and text[3] in "abc"),
    ({"choice": ["yes", "no", "maybe"]}, lambda text: text in {"yes", "no", "maybe"}),
    ({"grammar": 'root ::= "1" | "2" root'}, lambda text: text.endswith("1") and set(text[:-1]) <= {"2"}),
    ({"json": {"type": "integer", "minimum": 10, "maximum": 99}}, lambda text: 10 <= json.loads(text) <= 99),
]


@pytest.mark.parametrize(("structure", "is_right"), STRUCTURES, ids=[next(iter(one)) for one, _ in STRUCTURES])
async def test_completions_have_the_structure_that_is_asked_for(
    engine: Engine, tiny_model: Path, structure: dict[str, Any], is_right: Callable[[str], bool]
) -> None:
    config = a_config(tiny_model, generation_kwargs={"structured_outputs": structure})
    for completion in await sample(engine, config):
        if completion.finish_reason == "stop":
            assert is_right(completion.text), completion.text


async def test_structured_logprobs_are_from_the_distribution_over_allowed_tokens(
    engine: Engine, tiny_model: Path, reference: Reference
) -> None:
    is_digit = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    is_digit[DIGITS] = True
    config = a_config(tiny_model, temperature=0.9, vllm_structured_outputs_regex="[0-9]{3}")
    for completion in await sample(engine, config):
        ids = list(completion.token_ids)
        assert (len(ids), ids[-1], completion.finish_reason) == (4, EOS_TOKEN_ID, "stop")
        logits = reference.logits(PROMPT, ids) / 0.9
        expected = of_sampled(only(logits[:3], is_digit), ids[:3])
        assert (torch.tensor(completion.logprobs[:3]) - expected).abs().max() < 1e-4
        # Only the end of sequence was allowed, so it has probability 1 and logprob 0.
        assert completion.logprobs[3] == pytest.approx(0.0, abs=1e-6)


async def test_a_structure_vllm_cannot_make_is_the_prompts_end_and_not_the_engines(
    engine: Engine, tiny_model: Path
) -> None:
    with pytest.raises(MessageError, match="regex"):
        await sample(engine, a_config(tiny_model, vllm_structured_outputs_regex="[a-"))
    assert not engine.is_dead
