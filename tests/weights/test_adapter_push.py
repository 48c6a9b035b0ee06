"""The push of a LoRA run to a real vLLM: only adapters are sent, and the generator's logprobs equal PEFT's."""

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from services.trainer.push.weight_sender import WeightSender
from shared.errors import PushError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.weights.known_weights import PROMPT_IDS, adapters_of, logprobs_of, make_adapter_policy
from tests.weights.replica import HEADERS, ReplicaProcess, Sample
from tests.weights.senders import make_sender
from tests.weights.spans import check, check_spans, kept_busy, worst

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

log = logging.getLogger(__name__)
MAX_DIFFERENCE = 1e-4
UP_PROJ = "base_model.model.model.layers.1.mlp.up_proj"


async def test_every_span_sampled_under_load_matches_the_adapters_it_names(
    adapter_replica: ReplicaProcess, tied_model_dir: Path, redis: Redis, run_keys: RunKeys, sender: WeightSender
) -> None:
    await adapter_replica.register(redis, run_keys)
    policies = {version: make_adapter_policy(tied_model_dir, seed=version) for version in range(4)}
    first = await sender.push(lambda: adapters_of(policies[0]).items(), policy_version=0)
    assert first.failed == {}
    # 2 layers of 7 matrices, each r * (in + out) float32 numbers.
    sides = [64 + 64] * 4 + [64 + 128] * 3
    assert first.num_bytes == 2 * 4 * sum(sides) * 4
    await check(adapter_replica, policies[0], version=0, max_difference=MAX_DIFFERENCE)
    async with kept_busy(adapter_replica) as completions:
        for version in (1, 2, 3):
            await adapter_replica.sample(PROMPT_IDS, max_tokens=20)
            adapters = adapters_of(policies[version])
            result = await sender.push(adapters.items, policy_version=version)
            assert result.is_confirmed, result
            log.info("standstill %d ms", round(1000 * result.standstill_s))
    checked = check_spans(completions, policies.__getitem__)
    assert checked.num_crossings, "no push fell into a completion; nothing was tested"
    assert checked.worst <= MAX_DIFFERENCE


@pytest.mark.parametrize(
    ("wrong", "reason", "is_held"),
    [
        (
            {f"{UP_PROJ}.lora_B.weight": None},
            "one half of 1 adapters, among them ['model.layers.1.mlp.up_proj']",
            False,
        ),
        (
            {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(4, 64)},
            "no layer for 1 of the pushed adapters, among them ['model.layers.7.mlp.up_proj']",
            False,
        ),
        ({f"{UP_PROJ}.lora_A.weight": torch.zeros(8, 64)}, "has rank 8, the run has 4", False),
        ({f"{UP_PROJ}.lora_A.weight": torch.zeros(4, 65)}, "loading the adapter failed", True),
    ],
    ids=["a half", "of another model", "of another rank", "of another size"],
)
async def test_adapters_that_do_not_fit_are_refused_and_the_next_ones_heal(
    wrong: dict[str, torch.Tensor | None],
    reason: str,
    is_held: bool,
    adapter_replica: ReplicaProcess,
    tied_model_dir: Path,
    redis: Redis,
    run_keys: RunKeys,
    incarnation: int,
    sender: WeightSender,
) -> None:
    await adapter_replica.register(redis, run_keys)
    before, policy = (make_adapter_policy(tied_model_dir, seed=seed) for seed in (4, 5))
    assert (await sender.push(adapters_of(before).items, policy_version=4)).is_confirmed
    await redis.set(run_keys.epoch, incarnation + 1)
    faulty = make_sender(redis, incarnation + 1)
    whole = adapters_of(policy)
    pushed = {name: tensor for name, tensor in (whole | wrong).items() if tensor is not None}
    result = await faulty.push(lambda: pushed.items(), policy_version=5)
    await faulty.close()
    assert not result.is_confirmed
    assert reason in result.failed[adapter_replica.replica_id]
    info = adapter_replica.info()
    assert (info.is_held, info.policy_version) == (is_held, -1 if is_held else 4)
    if not is_held:
        await check(adapter_replica, before, version=4, max_difference=MAX_DIFFERENCE)
    await redis.set(run_keys.epoch, incarnation + 2)
    heir = make_sender(redis, incarnation + 2)
    healed = await heir.push(lambda: whole.items(), policy_version=5)
    await heir.close()
    assert healed.is_confirmed
    await check(adapter_replica, policy, version=5, max_difference=MAX_DIFFERENCE)


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
    await check(adapter_replica, after, version=9, max_difference=MAX_DIFFERENCE)


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
    assert worst(sample, logprobs_of(policy, PROMPT_IDS, sample.token_ids)) <= MAX_DIFFERENCE
