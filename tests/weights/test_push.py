"""The push against a real vLLM: what the generator says afterwards is what transformers says of the pushed weights."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import Qwen3ForCausalLM

from services.trainer.push.weight_sender import WeightSender
from shared.keys import RunKeys
from shared.redis_connection import Redis
from tests.weights.conftest import PUSH_TIMEOUT_S, make_sender
from tests.weights.known_weights import PROMPT_IDS, interrupted, logprobs_of, make_policy, weights_of
from tests.weights.replica import ReplicaProcess, Sample

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

log = logging.getLogger(__name__)
MAX_DIFFERENCE = 1e-3


async def check(replica: ReplicaProcess, policy: Qwen3ForCausalLM, *, version: int) -> None:
    """Assert that the replica samples from ``policy``, and calls it ``version``."""
    sample = await replica.sample(PROMPT_IDS, max_tokens=48)
    difference = worst(sample, logprobs_of(policy, PROMPT_IDS, sample.token_ids))
    log.info("%s, version %d: max abs difference of logprobs %.2e", replica.replica_id, version, difference)
    assert sample.spans == [(version, 0, 48)]
    assert difference <= MAX_DIFFERENCE


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110  the other process cannot set an event
        await asyncio.sleep(0.05)


def worst(sample: Sample, expected: list[float]) -> float:
    return max(abs(mine - theirs) for mine, theirs in zip(sample.logprobs, expected, strict=True))


@pytest.mark.parametrize("kind", ["untied", "tied"])
async def test_after_a_push_the_generator_samples_from_the_pushed_weights(
    kind: str, request: pytest.FixtureRequest, redis: Redis, run_keys: RunKeys, sender: WeightSender
) -> None:
    replica: ReplicaProcess = request.getfixturevalue("replica" if kind == "untied" else "tied_replica")
    model_dir: Path = request.getfixturevalue("model_dir" if kind == "untied" else "tied_model_dir")
    await replica.register(redis, run_keys)
    for version in (0, 1):
        policy = make_policy(model_dir, seed=version)
        result = await sender.push(weights_of(policy), policy_version=version)
        assert result.failed == {}
        assert result.members == (replica.replica_id,)
        assert result.is_confirmed
        total_ms, standstill_ms = round(result.total_s * 1000), round(result.standstill_s * 1000)
        log.info("%s: push %d ms, standstill %d ms, %d bytes", kind, total_ms, standstill_ms, result.num_bytes)
        await check(replica, policy, version=version)
        assert int(await redis.get(run_keys.required_version) or -1) == version
    assert not await sender.needs_push()


async def test_every_span_sampled_under_load_matches_the_version_it_names(
    replica: ReplicaProcess, model_dir: Path, redis: Redis, run_keys: RunKeys, sender: WeightSender
) -> None:
    await replica.register(redis, run_keys)
    policies = [make_policy(model_dir, seed=version) for version in range(4)]
    await sender.push(weights_of(policies[0]), policy_version=0)
    is_over = asyncio.Event()

    async def keep_sampling(prompt_ids: list[int]) -> list[Sample]:
        samples: list[Sample] = []
        while not is_over.is_set():
            sample = await replica.sample(prompt_ids, max_tokens=200)
            samples.append(sample)
        return samples

    prompts = [[*PROMPT_IDS, 5 + number] for number in range(8)]
    tasks = [asyncio.create_task(keep_sampling(prompt_ids), name="keep sampling") for prompt_ids in prompts]
    totals: list[int] = []
    standstills: list[int] = []
    for version in (1, 2, 3):
        await replica.sample(PROMPT_IDS, max_tokens=20)
        result = await sender.push(weights_of(policies[version]), policy_version=version)
        assert result.is_confirmed
        totals.append(round(result.total_s * 1000))
        standstills.append(round(result.standstill_s * 1000))
    is_over.set()
    sampled = zip(prompts, await asyncio.gather(*tasks), strict=True)
    completions = [(prompt_ids, sample) for prompt_ids, samples in sampled for sample in samples]
    difference, num_spans = 0.0, 0
    for prompt_ids, sample in completions:
        assert sample.spans[0][1] == 0
        assert sample.spans[-1][2] == 200
        for version, start, end in sample.spans:
            expected = logprobs_of(policies[version], prompt_ids, sample.token_ids)[start:end]
            span = Sample(sample.token_ids[start:end], sample.logprobs[start:end], [])
            difference = max(difference, worst(span, expected))
            num_spans += 1
    log.info(
        "%d completions, %d spans, max abs difference %.2e; pushes %s ms, standstill %s ms",
        len(completions),
        num_spans,
        difference,
        totals,
        standstills,
    )
    assert num_spans > len(completions), "no push fell into a completion; nothing was tested"
    assert difference <= MAX_DIFFERENCE


async def test_a_push_that_lacks_a_parameter_is_refused_and_the_next_complete_one_heals(
    replica: ReplicaProcess,
    model_dir: Path,
    redis: Redis,
    run_keys: RunKeys,
    incarnation: int,
    sender: WeightSender,
) -> None:
    await replica.register(redis, run_keys)
    policy = make_policy(model_dir, seed=5)
    whole = dict(policy.named_parameters())
    lacking = [(name, weight) for name, weight in whole.items() if name != "model.layers.1.self_attn.k_proj.weight"]
    result = await sender.push(lambda: lacking, policy_version=5)
    assert not result.is_confirmed
    assert "model.layers.1.self_attn.qkv_proj (a part of it)" in result.failed[replica.replica_id]
    assert replica.info().is_held
    assert replica.info().policy_version == -1
    await redis.set(run_keys.epoch, incarnation + 1)
    heir = make_sender(redis, incarnation + 1)
    healed = await heir.push(weights_of(policy), policy_version=5)
    await heir.close()
    assert healed.is_confirmed
    await check(replica, policy, version=5)


async def test_after_a_trainer_died_in_the_middle_the_replica_stays_held_until_the_next_one_is_through(
    replica: ReplicaProcess, model_dir: Path, redis: Redis, redis_url: str, run_keys: RunKeys, incarnation: int
) -> None:
    await replica.register(redis, run_keys)
    dying = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.weights.dying_trainer", redis_url, str(model_dir), str(incarnation),
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    async with asyncio.timeout(60):
        assert await dying.wait() == 9
        await until(lambda: replica.info().epoch == 0)
    assert replica.info().is_held
    assert replica.info().policy_version != 99
    await redis.set(run_keys.epoch, next_incarnation := incarnation + 1000)
    heir = make_sender(redis, next_incarnation)
    assert await heir.needs_push()
    policy = make_policy(model_dir, seed=6)
    result = await heir.push(weights_of(policy), policy_version=6)
    await heir.close()
    assert result.is_confirmed
    await check(replica, policy, version=6)


async def test_a_replica_killed_in_the_middle_of_a_push_does_not_keep_the_other_from_the_new_version(
    replica: ReplicaProcess,
    mortal: ReplicaProcess,
    model_dir: Path,
    redis: Redis,
    run_keys: RunKeys,
    sender: WeightSender,
) -> None:
    await replica.register(redis, run_keys)
    await mortal.register(redis, run_keys)
    policies = [make_policy(model_dir, seed=10), make_policy(model_dir, seed=11)]
    result = await sender.push(weights_of(policies[0]), policy_version=10)
    assert result.members == ("generator-1", "generator-2")
    for member in (replica, mortal):
        await check(member, policies[0], version=10)
    started = time.monotonic()
    result = await sender.push(interrupted(policies[1], at=8, by=mortal.kill), policy_version=11)
    log.info("a push in which a replica was killed took %.2f s", result.total_s)
    assert time.monotonic() - started < 2 * PUSH_TIMEOUT_S
    assert result.members == ("generator-1",)
    assert set(result.failed) == {"generator-2"}
    await check(replica, policies[1], version=11)
