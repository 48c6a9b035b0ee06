"""The prefix cache of a real engine: shared within a group, and never across a push."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from services.generator.engine.engine import Engine, start_engine
from services.generator.engine.engine_spec import spec_for
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.generator.engine.reference import Reference
from tests.generator.test_generation import a_config
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.vllm, pytest.mark.timeout(900)]

LONG_PROMPT = [4 + token % 50 for token in range(96)]
BLOCK = 32


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small_engine(tiny_model: Path, vllm_environment: None) -> AsyncIterator[Engine]:
    """Return a separate engine whose weights a test may change. It decodes four requests at once.

    The cache shares whole blocks of a prompt, and on CPU a block has 128 tokens by default.
    """
    config = a_config(
        tiny_model, vllm={"max_num_seqs": 4, "block_size": BLOCK}, max_prompt_length=100, max_completion_length=800
    )
    engine = await start_engine(spec_for(config, has_cuda=False), extra_args={}, has_cuda=False, timeout_s=600)
    await engine.client.update_weight_version("0")
    yield engine
    await engine.shutdown()


async def num_cached(engine: Engine, prompt_ids: list[int], *, n: int = 1) -> int:
    """Sample, and return how many prompt tokens of the last completion came from the cache."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(n=n, max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
    final: Any = None
    async for output in engine.client.generate({"prompt_token_ids": prompt_ids}, params, "of-a-test"):
        final = output
    return int(final.num_cached_tokens)


async def change_weights(engine: Engine, directory: Path, *, label: str, clear_cache: bool) -> None:
    await engine.client.pause_generation(mode="keep", clear_cache=clear_cache)
    await engine.client.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
    await engine.client.update_weight_version(label)
    await engine.client.resume_generation()


async def test_completions_of_one_prompt_share_its_prefix(small_engine: Engine) -> None:
    # All but the last block: at least one token is computed.
    assert await num_cached(small_engine, LONG_PROMPT, n=4) == len(LONG_PROMPT) - BLOCK


async def test_a_hold_ends_what_a_prompt_finds_in_the_cache_though_it_is_kept(small_engine: Engine) -> None:
    prompt = list(reversed(LONG_PROMPT))
    assert await num_cached(small_engine, prompt) == 0
    assert await num_cached(small_engine, prompt) == len(prompt) - BLOCK
    await small_engine.client.pause_generation(mode="keep", clear_cache=False)
    await small_engine.client.resume_generation()
    assert await num_cached(small_engine, prompt) == 0
    assert await num_cached(small_engine, prompt) == len(prompt) - BLOCK


async def test_no_prompt_read_by_old_weights_is_used_after_a_push_that_keeps_the_cache(
    small_engine: Engine, tiny_model: Path, tmp_path: Path
) -> None:
    engine = small_engine
    config = a_config(tiny_model, max_prompt_length=100, kv_after_push="keep")
    other = make_tiny_model(tmp_path / "other", seed=1)
    old, new = Reference(tiny_model), Reference(other)
    await check_against(engine, old, config)
    await change_weights(engine, other, label="1", clear_cache=False)
    await check_against(engine, new, config)
    await check_queued(engine, tiny_model, config, before=new, after=old)


async def check_against(engine: Engine, reference: Reference, config: RunConfig) -> None:
    for completion in await engine.complete(LONG_PROMPT, num_completions=4, config=config, request_id="of-a-test"):
        expected = reference.logprobs(LONG_PROMPT, list(completion.token_ids))
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-4


async def check_queued(
    engine: Engine, directory: Path, config: RunConfig, *, before: Reference, after: Reference
) -> None:
    """Push weights while some requests for a prompt are decoded and others still wait in the queue."""
    group = asyncio.create_task(
        engine.complete(LONG_PROMPT, num_completions=12, config=config, request_id="queued"), name="group"
    )
    await eventually(lambda: engine.client.get_num_unfinished_requests() == 12)
    await change_weights(engine, directory, label="2", clear_cache=False)
    whole = [0, 0]
    for completion in await group:
        ids, logprobs = list(completion.token_ids), torch.tensor(completion.logprobs)
        label, start, end = completion.spans[0]
        if label == "2":
            assert (logprobs - after.logprobs(LONG_PROMPT, ids)).abs().max() < 1e-4
        else:
            assert (logprobs - before.logprobs(LONG_PROMPT, ids))[start:end].abs().max() < 1e-4
        whole[label == "2"] += 1
    assert whole[1] > 0, "no completion began after the push"


@pytest.mark.parametrize(("clear_cache", "num_recomputed"), [(True, 3), (False, 0)])
async def test_recomputation_after_a_push_is_not_taken_for_a_lack_of_memory(
    small_engine: Engine, *, clear_cache: bool, num_recomputed: int
) -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    async def sample() -> None:
        params = SamplingParams(n=3, max_tokens=800, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
        async for _ in small_engine.client.generate({"prompt_token_ids": LONG_PROMPT}, params, "across-a-hold"):
            pass

    small_engine.take_load()
    sampling = asyncio.create_task(sample(), name="sample across a hold")
    await eventually(lambda: small_engine.take_load().num_running == 3)
    await small_engine.client.pause_generation(mode="keep", clear_cache=clear_cache)
    await small_engine.client.resume_generation()
    await sampling
    load = small_engine.take_load()
    assert (load.num_preempted, load.num_recomputed) == (0, num_recomputed)
