"""The push to a real vLLM: afterwards, its logprobs equal transformers' logprobs under the pushed weights."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.trainer.push.weight_sender import WeightSender
from shared.lineage import LineageVersion
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.weights.known_weights import PROMPT_IDS, interrupted, logprobs_of, make_policy, prober_of, weights_of
from tests.weights.replica import ReplicaProcess, Sample
from tests.weights.senders import PUSH_TIMEOUT_S, make_sender
from tests.weights.spans import MAX_DIFFERENCE, check, check_spans, kept_busy, worst

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

log = logging.getLogger(__name__)


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110  the other process cannot set an event
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("kind", ["untied", "tied"])
async def test_after_a_push_the_generator_samples_from_the_pushed_weights(
    kind: str,
    request: pytest.FixtureRequest,
    redis: Redis,
    run_keys: RunKeys,
    incarnation: int,
    sender: WeightSender,
) -> None:
    replica: ReplicaProcess = request.getfixturevalue("replica" if kind == "untied" else "tied_replica")
    model_dir: Path = request.getfixturevalue("model_dir" if kind == "untied" else "tied_model_dir")
    await replica.register(redis, run_keys)
    for version in (0, 1):
        policy = make_policy(model_dir, seed=version)
        result = await sender.push(weights_of(policy), policy_version=version, prober=prober_of(policy))
        assert result.failed == {}
        assert result.members == (replica.replica_id,)
        assert result.is_confirmed
        total_ms, standstill_ms = round(result.total_s * 1000), round(result.standstill_s * 1000)
        log.info("%s: push %d ms, standstill %d ms, %d bytes", kind, total_ms, standstill_ms, result.num_bytes)
        await check(replica, policy, version=version)
        assert await redis.get(run_keys.required_version) == str(LineageVersion(incarnation, version)).encode()
    assert not await sender.needs_push()


@pytest.mark.parametrize("push_staging", ["memory", "none"])
async def test_every_span_sampled_under_load_matches_the_version_it_names(
    push_staging: str,
    replica: ReplicaProcess,
    model_dir: Path,
    redis: Redis,
    run_keys: RunKeys,
    sender: WeightSender,
) -> None:
    await replica.attach(push_staging=push_staging)
    await replica.register(redis, run_keys)
    policies = {version: make_policy(model_dir, seed=version) for version in range(4)}
    await sender.push(weights_of(policies[0]), policy_version=0)
    async with kept_busy(replica) as completions:
        for version in (1, 2, 3):
            await replica.sample(PROMPT_IDS, max_tokens=20)
            policy = policies[version]
            result = await sender.push(weights_of(policy), policy_version=version, prober=prober_of(policy))
            assert result.is_confirmed, result
            assert result.probe_max_diff is not None
            assert result.probe_max_diff < MAX_DIFFERENCE
            total_ms, standstill_ms = round(1000 * result.total_s), round(1000 * result.standstill_s)
            log.info("push %d ms, standstill %d ms", total_ms, standstill_ms)
    checked = check_spans(completions, policies.__getitem__)
    assert checked.num_crossings, "no push fell into a completion; nothing was tested"
    assert checked.worst <= MAX_DIFFERENCE


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.qkv_proj (a part of it)"),
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
async def test_a_push_that_lacks_a_parameter_is_refused_before_anything_moves(
    name: str,
    reason: str,
    replica: ReplicaProcess,
    model_dir: Path,
    redis: Redis,
    run_keys: RunKeys,
    incarnation: int,
    sender: WeightSender,
) -> None:
    await replica.attach()
    await replica.register(redis, run_keys)
    before, after = make_policy(model_dir, seed=4), make_policy(model_dir, seed=5)
    assert (await sender.push(weights_of(before), policy_version=4)).is_confirmed
    await redis.set(run_keys.epoch, incarnation + 1)
    lacking = make_sender(redis, incarnation + 1)
    pushed = [(found, weight) for found, weight in after.named_parameters() if found != name]
    result = await lacking.push(lambda: pushed, policy_version=5)
    await lacking.close()
    assert not result.is_confirmed
    assert "the push lacks 1 parameters of the model" in result.failed[replica.replica_id]
    assert reason in result.failed[replica.replica_id]
    assert (replica.info().policy_version, replica.info().is_held) == (4, False)
    await check(replica, before, version=4)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((32, 64), "model.layers.1.self_attn.k_proj.weight does not fit"),
        ((128, 64), "takes only a part of 1 parameters, among them ['model.layers.1.self_attn.k_proj.weight']"),
        (None, "do not have the engine's dtype torch.float32"),
    ],
)
async def test_a_parameter_of_another_shape_or_dtype_is_refused_before_anything_moves(
    shape: tuple[int, ...] | None,
    reason: str,
    replica: ReplicaProcess,
    model_dir: Path,
    redis: Redis,
    run_keys: RunKeys,
    sender: WeightSender,
) -> None:
    await replica.attach()
    await replica.register(redis, run_keys)
    wrong = "model.layers.1.self_attn.k_proj.weight"
    weights = dict(make_policy(model_dir, seed=5).named_parameters())
    other = torch.zeros(shape) if shape is not None else weights[wrong].to(torch.bfloat16)
    pushed = {**weights, wrong: other}
    result = await sender.push(lambda: pushed.items(), policy_version=5)
    assert not result.is_confirmed
    assert reason in result.failed[replica.replica_id]
    assert not replica.info().is_held


async def test_without_staging_a_transfer_that_broke_is_never_served_and_the_next_one_heals(
    replica: ReplicaProcess, model_dir: Path, redis: Redis, redis_url: str, run_keys: RunKeys, incarnation: int
) -> None:
    await replica.attach(push_staging="none")
    await replica.register(redis, run_keys)
    dying = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.weights.dying_trainer", redis_url, str(model_dir), str(incarnation),
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    async with asyncio.timeout(120):
        assert await dying.wait() == 9
        await until(lambda: replica.info().epoch == 0)
    assert (replica.info().policy_version, replica.info().is_held) == (-1, True)
    await redis.set(run_keys.epoch, incarnation + 1)
    heir = make_sender(redis, incarnation + 1)
    policy = make_policy(model_dir, seed=7)
    assert (await heir.push(weights_of(policy), policy_version=7)).is_confirmed
    await heir.close()
    await check(replica, policy, version=7)


async def test_kept_keys_and_values_come_from_the_old_weights_and_new_requests_never_use_them(
    replica: ReplicaProcess, model_dir: Path, redis: Redis, run_keys: RunKeys, sender: WeightSender
) -> None:
    await replica.attach(kv_after_push="keep")
    await replica.register(redis, run_keys)
    policies = [make_policy(model_dir, seed=0), make_policy(model_dir, seed=1)]
    await sender.push(weights_of(policies[0]), policy_version=0)
    sample = Sample([], [], [])
    # One request at a time until a push happens during one.
    for version in range(1, 20):
        sampling = asyncio.create_task(replica.sample(PROMPT_IDS, max_tokens=200), name="sample")
        await replica.sample(PROMPT_IDS, max_tokens=20)
        policy = policies[version % 2]
        assert (await sender.push(weights_of(policy), policy_version=version, prober=prober_of(policy))).is_confirmed
        sample = await sampling
        if len(sample.spans) == 2:
            break
    assert len(sample.spans) == 2, "no push fell into a completion; nothing was tested"
    (old, _, changed), (new, _, end) = sample.spans
    before = logprobs_of(policies[old % 2], PROMPT_IDS, sample.token_ids)[:changed]
    assert worst(sample, before, end=changed) <= MAX_DIFFERENCE
    for policy in policies:
        of_one = logprobs_of(policy, PROMPT_IDS, sample.token_ids)[changed:end]
        assert worst(sample, of_one, start=changed, end=end) > 10 * MAX_DIFFERENCE, (
            "the keys of the old weights were not kept"
        )
    await check(replica, policies[new % 2], version=new)


async def test_wrongly_loaded_weights_are_caught_by_the_probe_and_no_token_of_them_is_published(
    tied_replica: ReplicaProcess,
    tied_model_dir: Path,
    redis: Redis,
    run_keys: RunKeys,
    incarnation: int,
    sender: WeightSender,
) -> None:
    await tied_replica.attach()
    await tied_replica.register(redis, run_keys)
    before, after = make_policy(tied_model_dir, seed=0), make_policy(tied_model_dir, seed=1)
    assert (await sender.push(weights_of(before), policy_version=0, prober=prober_of(before))).is_confirmed
    refusals: list[int] = []
    async with kept_busy(tied_replica, num_requests=4, max_tokens=100, refusals=refusals) as completions:
        await tied_replica.sample(PROMPT_IDS, max_tokens=20)
        version = 0
        while not refusals:  # until requests were under way at the wrong weights
            version += 1
            pushed = after if version % 2 else before
            await tied_replica.set_fault("old head")
            result = await sender.push(weights_of(pushed), policy_version=version, prober=prober_of(pushed))
            await tied_replica.set_fault("")
            assert not result.is_confirmed
            assert result.num_probes_failed == 1
            assert "a logprob of the probe is off by" in result.failed[tied_replica.replica_id]
            assert (tied_replica.info().policy_version, tied_replica.info().is_held) == (-1, True)
            healed = await sender.push(weights_of(pushed), policy_version=version, prober=prober_of(pushed))
            assert healed.is_confirmed
            assert healed.communicator_epoch > result.communicator_epoch
            await check(tied_replica, pushed, version=version)
    assert check_spans(completions, lambda number: after if number % 2 else before).worst <= MAX_DIFFERENCE


@pytest.mark.long
async def test_a_replica_killed_in_the_middle_of_a_push_does_not_keep_the_other_from_the_new_version(
    replica: ReplicaProcess,
    mortal: ReplicaProcess,
    model_dir: Path,
    redis: Redis,
    run_keys: RunKeys,
    sender: WeightSender,
) -> None:
    for member in (replica, mortal):
        await member.attach()
        await member.register(redis, run_keys)
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
