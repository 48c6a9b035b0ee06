"""The push to an engine with several workers: each is a rank, and each loads its own part."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.trainer.push.weight_sender import WeightSender
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.weights.known_weights import make_policy, prober_of, weights_of
from tests.weights.replica import ReplicaProcess
from tests.weights.spans import check

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(params=["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def pair(request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path) -> Iterator[ReplicaProcess]:
    """Return a replica of two workers."""
    args = json.dumps({request.param: 2, "num_gpu_blocks_override": 64})
    process = ReplicaProcess("generator-pair", model_dir, tmp_path / "log", more={"--engine-args": args})
    try:
        process.wait_until_up()
        yield process
    finally:
        process.kill()


async def test_both_workers_sample_from_the_pushed_weights(
    pair: ReplicaProcess, model_dir: Path, redis: Redis, run_keys: RunKeys, sender: WeightSender
) -> None:
    assert pair.info().num_workers == 2
    await pair.register(redis, run_keys)
    for version in (0, 1):
        policy = make_policy(model_dir, seed=version)
        result = await sender.push(weights_of(policy), policy_version=version, prober=prober_of(policy))
        assert result.failed == {}
        assert result.is_confirmed
        for _ in range(4):  # so that each of the two engine cores is asked
            await check(pair, policy, version=version)


async def test_after_a_worker_that_failed_to_load_the_next_push_succeeds(
    pair: ReplicaProcess, model_dir: Path, redis: Redis, run_keys: RunKeys, sender: WeightSender
) -> None:
    await pair.register(redis, run_keys)
    policy = make_policy(model_dir, seed=1)
    await pair.set_fault("no memory")
    result = await sender.push(weights_of(policy), policy_version=0, prober=prober_of(policy))
    assert "no memory on this worker" in result.failed["generator-pair"]
    await pair.set_fault("")
    result = await sender.push(weights_of(policy), policy_version=0, prober=prober_of(policy))
    assert result.failed == {}
    await check(pair, policy, version=0)
