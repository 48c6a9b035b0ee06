"""The push of a LoRA run against a real vLLM: adapters alone travel, and the generator says what PEFT says of them."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from services.trainer.push.weight_sender import WeightSender
from shared.errors import PushError
from shared.keys import RunKeys
from shared.redis_connection import Redis
from tests.weights.conftest import make_sender
from tests.weights.known_weights import PROMPT_IDS, adapters_of, logprobs_of, make_adapter_policy
from tests.weights.replica import HEADERS, ReplicaProcess, Sample

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

log = logging.getLogger(__name__)
MAX_DIFFERENCE = 1e-4
UP_PROJ = "base_model.model.model.layers.1.mlp.up_proj"


def worst(sample: Sample, policy: Any, prompt_ids: list[int], *, start: int = 0, end: int | None = None) -> float:
    """Return the largest difference between the logprobs of a sample's span and those of PEFT."""
    expected = logprobs_of(policy, prompt_ids, sample.token_ids)[start:end]
    return max(abs(mine - theirs) for mine, theirs in zip(sample.logprobs[start:end], expected, strict=True))


async def check(replica: ReplicaProcess, policy: Any, *, version: int) -> None:
    """Assert that the replica samples from ``policy``, and calls it ``version``."""
    sample = await replica.sample(PROMPT_IDS, max_tokens=48)
    assert sample.spans == [(version, 0, 48)]
    assert worst(sample, policy, PROMPT_IDS) <= MAX_DIFFERENCE


async def test_every_span_sampled_under_load_matches_the_adapters_it_names(
    adapter_replica: ReplicaProcess, tied_model_dir: Path, redis: Redis, run_keys: RunKeys, sender: WeightSender
) -> None:
    await adapter_replica.register(redis, run_keys)
    policies = [make_adapter_policy(tied_model_dir, seed=version) for version in range(4)]
    first = await sender.push(lambda: adapters_of(policies[0]).items(), policy_version=0)
    assert first.failed == {}
    # 2 layers of 7 matrices: r * (in + out) float32 numbers each.
    sides = [64 + 64] * 4 + [64 + 128] * 3
    assert first.num_bytes == 2 * 4 * sum(sides) * 4
    await check(adapter_replica, policies[0], version=0)
    is_over = asyncio.Event()

    async def keep_sampling(prompt_ids: list[int]) -> list[Sample]:
        samples: list[Sample] = []
        while not is_over.is_set():
            samples.append(await adapter_replica.sample(prompt_ids, max_tokens=200))
        return samples

    prompts = [[*PROMPT_IDS, 5 + number] for number in range(8)]
    tasks = [asyncio.create_task(keep_sampling(prompt_ids), name="keep sampling") for prompt_ids in prompts]
    standstills: list[int] = []
    for version in (1, 2, 3):
        await adapter_replica.sample(PROMPT_IDS, max_tokens=20)
        adapters = adapters_of(policies[version])
        result = await sender.push(adapters.items, policy_version=version)
        assert result.is_confirmed
        standstills.append(round(result.standstill_s * 1000))
    is_over.set()
    sampled = zip(prompts, await asyncio.gather(*tasks), strict=True)
    completions = [(prompt_ids, sample) for prompt_ids, samples in sampled for sample in samples]
    spans = [(prompt_ids, sample, span) for prompt_ids, sample in completions for span in sample.spans]
    difference = max(
        worst(sample, policies[version], prompt_ids, start=start, end=end)
        for prompt_ids, sample, (version, start, end) in spans
    )
    log.info("%d spans, max abs difference %.2e, standstill %s ms", len(spans), difference, standstills)
    assert len(spans) > len(completions), "no push fell into a completion; nothing was tested"
    assert difference <= MAX_DIFFERENCE


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({f"{UP_PROJ}.lora_B.weight": None}, "one half of 1 adapters, among them ['model.layers.1.mlp.up_proj']"),
        (
            {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(4, 64)},
            "no layer for 1 of the pushed adapters, among them ['model.layers.7.mlp.up_proj']",
        ),
        ({f"{UP_PROJ}.lora_A.weight": torch.zeros(8, 64)}, "has rank 8, the run has 4"),
        ({f"{UP_PROJ}.lora_A.weight": torch.zeros(4, 65)}, "loading the adapter failed"),
    ],
    ids=["a half", "of another model", "of another rank", "of another size"],
)
async def test_adapters_that_do_not_fit_are_refused_and_the_next_ones_heal(
    wrong: dict[str, torch.Tensor | None],
    reason: str,
    adapter_replica: ReplicaProcess,
    tied_model_dir: Path,
    redis: Redis,
    run_keys: RunKeys,
    incarnation: int,
    sender: WeightSender,
) -> None:
    await adapter_replica.register(redis, run_keys)
    policy = make_adapter_policy(tied_model_dir, seed=5)
    whole = adapters_of(policy)
    pushed = {name: tensor for name, tensor in (whole | wrong).items() if tensor is not None}
    result = await sender.push(lambda: pushed.items(), policy_version=5)
    assert not result.is_confirmed
    assert reason in result.failed[adapter_replica.replica_id]
    assert adapter_replica.info().is_held
    assert adapter_replica.info().policy_version == -1
    await redis.set(run_keys.epoch, incarnation + 1)
    heir = make_sender(redis, incarnation + 1)
    healed = await heir.push(lambda: whole.items(), policy_version=5)
    await heir.close()
    assert healed.is_confirmed
    await check(adapter_replica, policy, version=5)


async def test_a_transfer_that_breaks_in_the_middle_is_repeated_and_serves_the_new_adapters(
    adapter_replica: ReplicaProcess, tied_model_dir: Path, redis: Redis, run_keys: RunKeys, sender: WeightSender
) -> None:
    await adapter_replica.register(redis, run_keys)
    before, after = (make_adapter_policy(tied_model_dir, seed=seed) for seed in (8, 9))
    await sender.push(lambda: adapters_of(before).items(), policy_version=8)
    num_passes = 0

    def breaking() -> Any:
        nonlocal num_passes
        num_passes += 1
        for index, named in enumerate(adapters_of(after).items()):
            if num_passes == 2 and index == 20:  # the first pass announces
                raise PushError("the trainer lost its thread")
            yield named

    result = await sender.push(breaking, policy_version=9)
    assert result.is_confirmed
    await check(adapter_replica, after, version=9)


async def test_a_strangers_completion_comes_from_the_adapters_too(
    adapter_replica: ReplicaProcess, tied_model_dir: Path, redis: Redis, run_keys: RunKeys, sender: WeightSender
) -> None:
    await adapter_replica.register(redis, run_keys)
    policy = make_adapter_policy(tied_model_dir, seed=12)
    assert (await sender.push(adapters_of(policy).items, policy_version=12)).is_confirmed
    body = {"model": "policy", "prompt": PROMPT_IDS, "max_tokens": 24, "logprobs": 0, "return_token_ids": True}
    async with httpx.AsyncClient(headers=HEADERS, timeout=60, trust_env=False) as client:
        response = await client.post(f"{adapter_replica.url}/v1/completions", json=body | {"ignore_eos": True})
    choice = response.raise_for_status().json()["choices"][0]
    sample = Sample(choice["token_ids"], choice["logprobs"]["token_logprobs"], [])
    assert len(sample.token_ids) == 24
    assert worst(sample, policy, PROMPT_IDS) <= MAX_DIFFERENCE
