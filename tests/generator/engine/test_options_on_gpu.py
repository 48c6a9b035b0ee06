"""Engine options that need a GPU: the samples are the policy's, within the rounding of bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.generator.engine.engine import start_engine
from services.generator.engine.engine_spec import spec_for
from tests.generator.engine.reference import Reference
from tests.generator.test_generation import a_config
from tests.tiny_model import VOCAB_SIZE

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(900),
]

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
ROUNDING = 0.3
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    "vllm",
    [
        {"speculative_config": NGRAM},
        {"quantization": "fp8"},
        pytest.param(
            {"tensor_parallel_size": 2},
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU"),
        ),
    ],
    ids=lambda args: next(iter(args)),
)
async def test_logprobs_are_the_policys(tiny_model: Path, vllm: dict[str, Any]) -> None:
    config = a_config(tiny_model, dtype="bfloat16", max_prompt_length=8, vllm={"enforce_eager": True} | vllm)
    engine = await start_engine(spec_for(config, has_cuda=True), extra_args={}, has_cuda=True, timeout_s=600)
    try:
        await engine.client.update_weight_version("0")
        reference = Reference(tiny_model)
        for completion in await engine.complete(PROMPT, num_completions=64, config=config, request_id="of-a-test"):
            ids = list(completion.token_ids)
            difference = torch.tensor(completion.logprobs) - reference.logprobs(PROMPT, ids)
            assert difference.abs().mean() < ROUNDING / 3
            assert difference.abs().max() < ROUNDING * (3 if "quantization" in vllm else 1)
            assert all(0 <= token < VOCAB_SIZE for token in ids)
            assert completion.spans == [("0", 0, len(ids))]
    finally:
        await engine.shutdown()
