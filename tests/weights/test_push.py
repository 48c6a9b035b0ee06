"""The push against a real vLLM: what the generator says afterwards is what transformers says of the pushed weights."""

import asyncio
from pathlib import Path

import pytest

from services.trainer.weight_sender import WeightSender
from shared.keys import RunKeys
from shared.redis_connection import Redis
from tests.weights.known_weights import PROMPT_IDS, logprobs_of, make_policy, weights_of
from tests.weights.replica import ReplicaProcess, Sample

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(300)]

MAX_DIFFERENCE = 1e-3


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
        sample = await replica.sample(PROMPT_IDS, max_tokens=48)
        difference = worst(sample, logprobs_of(policy, PROMPT_IDS, sample.token_ids))
        print(
            f"{kind}, version {version}: max abs difference of logprobs {difference:.2e}; "
            f"push {result.total_s * 1000:.0f} ms, standstill {result.standstill_s * 1000:.0f} ms, "
            f"{result.num_bytes} bytes"
        )
        assert sample.spans == [(version, 0, 48)]
        assert difference <= MAX_DIFFERENCE
        assert int(await redis.get(run_keys.required_version) or -1) == version
    assert not await sender.needs_push()
