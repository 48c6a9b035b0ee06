"""Engines started with a run's `vllm:` section: a cache that is too small, and speculative decoding."""

import asyncio
import contextlib
import dataclasses
import json
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.generator.engine.engine import Engine, start_engine
from services.generator.engine.engine_check import EngineChecker, judge
from services.generator.engine.engine_config import make_vllm_config, num_places
from services.generator.engine.engine_spec import spec_for
from services.generator.metrics import GeneratorMetrics
from shared.errors import UserError
from shared.files.file_roots import FileRoots
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
from tests.generator.engine.reference import Reference
from tests.generator.test_generation import a_config, a_prompt, admit, completed, generating

ANYWHERE = FileRoots(("/",), "HEADRACE_DATA_ROOTS")

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


@contextlib.asynccontextmanager
async def started(config: RunConfig, **of_replica: Any) -> AsyncGenerator[Engine]:
    spec = spec_for(config, has_cuda=False)
    engine = await start_engine(spec, extra_args=of_replica, has_cuda=False, timeout_s=600)
    try:
        await engine.client.update_weight_version("0")
        yield engine
    finally:
        await engine.shutdown()


async def check_logprobs(engine: Engine, config: RunConfig, reference: Reference, *, n: int = 8) -> None:
    for completion in await engine.complete(PROMPT, num_completions=n, config=config, request_id="of-a-test"):
        ids = list(completion.token_ids)
        expected = reference.logprobs(PROMPT, ids)
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-4
        assert completion.spans == [("0", 0, len(ids))]


@pytest.mark.long
async def test_the_window_keeps_a_small_cache_from_overflowing(
    session_redis: Redis, tiny_model: Path, vllm_environment: None
) -> None:
    # 48 blocks of 32 tokens; a group of 8 completions may need 8 * 4 blocks, plus its prompt.
    config = a_config(
        tiny_model, num_generations=8, max_completion_length=100, max_prompt_length=8, max_inflight_groups=16,
        vllm={"num_gpu_blocks_override": 48, "block_size": 32},
    )  # fmt: skip
    async with started(config) as engine:
        assert engine.first_window(config) == 1
        overfull = await most_preempted(engine, config)
        metrics = GeneratorMetrics()
        async with generating(session_redis, engine, config, metrics=metrics):
            await admit(session_redis, *(a_prompt(f"{group:08d}", n=8) for group in range(16)))
            await completed(session_redis, 16)
        followed = metrics.registry.get_sample_value("headrace_requests_preempted_total") or 0.0
    assert overfull > 20
    assert followed < overfull / 4


async def most_preempted(engine: Engine, config: RunConfig) -> int:
    """Return the largest number of requests that are preempted when 16 groups are submitted at once."""
    engine.take_load()
    groups = [
        engine.complete(PROMPT, num_completions=8, config=config, request_id=f"at-once-{group}") for group in range(16)
    ]
    await asyncio.gather(*groups)
    return engine.take_load().num_preempted


async def test_a_run_that_vllm_refuses_is_refused_before_anything_starts(
    tiny_model: Path, vllm_environment: None
) -> None:
    spec = dataclasses.replace(spec_for(a_config(tiny_model), has_cuda=False), of_run={"max_seqs": 1})
    with pytest.raises(UserError, match="no engine argument max_seqs; did you mean max_num_seqs"):
        await start_engine(spec, extra_args={}, has_cuda=False, timeout_s=600)


@pytest.mark.parametrize(
    ("options", "field", "sentence"),
    [
        ({"vllm": {"max_num_seqs": "many"}}, "vllm", "max_num_seqs"),
        ({"vllm": {"tensor_parallel_size": 3}}, "vllm", "divisible by tensor parallel size"),
        ({"vllm": {"quantization": "none-such"}}, "vllm", "none-such"),
        ({"vllm": {"speculative_config": {"method": "ngram"}}}, "vllm", "needs a GPU"),
        ({"vllm_structured_outputs_regex": "[a-"}, "vllm_structured_outputs_regex", "regex"),
        ({"generation_kwargs": {"structured_outputs": {"json": "{"}}}, "generation_kwargs", "refuses"),
        ({"generation_kwargs": {"stop_token_ids": [10_000]}}, "generation_kwargs", "refuses"),
        ({"tools": ["my:tool"], "tool_call_parser": "hermez"}, "tool_call_parser", "no parser 'hermez'"),
    ],
)  # fmt: skip
async def test_vllm_judges_what_only_it_knows(
    tiny_model: Path, vllm_environment: None, options: dict[str, Any], field: str, sentence: str
) -> None:
    verdict = judge(a_config(tiny_model, **options).model_dump(mode="json"), {})
    (problem,) = verdict.errors
    assert problem.field == field
    assert sentence in problem.message


async def test_the_sequences_of_a_longrope_model_stay_within_its_original_context(
    tiny_model: Path, tmp_path: Path, vllm_environment: None
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "longrope"))
    config = json.loads((model / "config.json").read_text())
    factors = {"long_factor": [2.0] * 16, "short_factor": [1.0] * 16, "original_max_position_embeddings": 64}
    config["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0, **factors}
    config["original_max_position_embeddings"] = 64
    (model / "config.json").write_text(json.dumps(config))

    def made(**options: Any) -> Any:
        return make_vllm_config(spec_for(a_config(model, **options), has_cuda=False), {}, has_cuda=False)

    assert made(max_completion_length=32, max_prompt_length=32).model_config.max_model_len == 64
    assert made(vllm={"max_model_len": 64}).model_config.max_model_len == 64
    with pytest.raises(UserError, match="other frequencies beyond 64 tokens") as caught:
        made(max_completion_length=32, max_prompt_length=33)
    assert caught.value.field == "vllm"


async def test_an_engine_on_a_gpu_has_the_batches_of_vllms_offline_class(
    tiny_model: Path, vllm_environment: None
) -> None:
    """This vLLM sees a CPU: for its class LLM it has 256 and 4096 there, without a context 128 and 2048."""
    batches: list[tuple[int, int]] = []
    for has_cuda in (False, True):
        config = a_config(tiny_model, max_completion_length=64)
        scheduler = make_vllm_config(spec_for(config, has_cuda=has_cuda), {}, has_cuda=has_cuda).scheduler_config
        batches.append((num_places(scheduler), scheduler.max_num_batched_tokens))
    assert batches == [(128, 2048), (256, 4096)]


async def test_the_check_runs_in_a_process_of_its_own_and_says_what_is_overruled(
    tiny_model: Path, vllm_environment: None
) -> None:
    checker = EngineChecker({"max_num_seqs": 4}, timeout_s=120, data=ANYWHERE, weights=ANYWHERE)
    config = a_config(tiny_model, vllm={"max_num_seqs": 8}, generation_kwargs={"stop": ["a"]})
    verdict = await checker.check(config.model_dump(mode="json"))
    assert verdict.errors == []
    assert verdict.warnings == [
        "vllm.max_num_seqs is overridden by HEADRACE_ENGINE_ARGS of the generators, which set 4"
    ]
