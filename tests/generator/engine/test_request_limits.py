"""Requests that would end vLLM's GPU engine are refused before it sees them. No engine is started."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from services.generator.engine.engine_config import check_limits
from shared.run_options.generation import GenerationKwargs
from tests.generator.test_generation import a_config
from tests.generator.turns.chat_models import QWEN_3, make_tokenizer

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _vllm(vllm_environment: None) -> None:
    """Have vLLM import without a GPU."""


def check(*, is_new: bool = True, **options: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.tokenizers.hf import get_cached_tokenizer

    params = SamplingParams(**options)
    vllm_config = SimpleNamespace(use_v2_model_runner=is_new, model_config=SimpleNamespace(max_model_len=100))
    check_limits(params, get_cached_tokenizer(make_tokenizer(QWEN_3)), vllm_config)
    return params


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("seed", {"seed": 1 << 63}),
        ("seed", {"seed": -(1 << 63) - 1}),
        ("min_tokens", {"min_tokens": 101, "max_tokens": 1000}),
        ("allowed_token_ids", {"allowed_token_ids": [*range(1025)]}),
        ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 1.0)}),
        ("stop_token_ids", {"min_tokens": 1, "stop_token_ids": [*range(113)]}),
        ("bad_words", {"bad_words": [f"{letter}{'x' * 100}" for letter in "abcdefghijk"]}),
    ],
)
def test_what_would_end_the_engine_is_refused_by_its_name(name: str, options: dict[str, Any]) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=f"^{name}: "):
        check(**options)


def test_ordinary_requests_pass_and_no_completion_is_longer_than_the_context() -> None:
    assert check(max_tokens=3_000_000_000).max_tokens == 100
    assert check(max_tokens=None).max_tokens is None
    check(seed=(1 << 63) - 1, allowed_token_ids=[*range(1024)], logit_bias={5: 100.0}, bad_words=["a", "bc"])
    check(stop_token_ids=[*range(1000)])
    check(is_new=False, allowed_token_ids=[*range(2000)])


def test_bad_words_are_texts() -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="bad_words: write a list of texts"):
        check(is_new=False, bad_words=[1])


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ({"temperature": 3.0}, "temperature must be in"),
        ({"generation_kwargs": GenerationKwargs(bad_words=[f"{letter}{'x' * 100}" for letter in "abcdefghijk"])},
         "bad_words: "),
    ],
)  # fmt: skip
async def test_options_that_would_end_the_engine_cost_the_group_and_not_the_engine(
    option: dict[str, Any], why: str, tiny_model: Path
) -> None:
    from vllm.tokenizers.hf import get_cached_tokenizer

    from services.generator.engine.engine import Engine
    from shared.errors import MessageError

    engine = Engine.__new__(Engine)
    vllm_config = SimpleNamespace(use_v2_model_runner=True, model_config=SimpleNamespace(max_model_len=100))
    tokenizer = get_cached_tokenizer(make_tokenizer(QWEN_3))
    # It has no method that samples.
    engine.client = SimpleNamespace(weights_label="0", vllm_config=vllm_config, get_tokenizer=lambda: tokenizer)
    config = a_config(tiny_model).model_copy(update=option)
    with pytest.raises(MessageError, match=why):
        await engine.complete([5, 6], num_completions=2, config=config, request_id="a")
