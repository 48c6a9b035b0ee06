"""Many pushes under load to two replicas with a real vLLM: every token was sampled with the weights of its span.

The weights of different versions are unrelated. If a token names the wrong one, or its keys and values are from
another, its logprob is off by nats.
"""

import contextlib
import logging
import statistics
from pathlib import Path

import pytest

from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.weights.known_weights import make_policy, prober_of, weights_of
from tests.weights.replica import ReplicaProcess
from tests.weights.senders import make_sender
from tests.weights.spans import MAX_DIFFERENCE, check_spans, kept_busy

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
log = logging.getLogger(__name__)


@pytest.mark.parametrize("num_pushes", [12, pytest.param(200, marks=pytest.mark.long)])
async def test_after_many_pushes_under_load_every_token_of_both_replicas_is_of_the_version_it_names(
    num_pushes: int,
    replica: ReplicaProcess,
    mortal: ReplicaProcess,
    model_dir: Path,
    redis: Redis,
    run_keys: RunKeys,
    incarnation: int,
) -> None:
    sender = make_sender(redis, incarnation, push_timeout_s=60.0)
    replicas = (replica, mortal)
    for member in replicas:
        await member.attach()
        await member.register(redis, run_keys)
    totals: list[float] = []
    standstills: list[float] = []

    async def push(version: int) -> None:
        policy = make_policy(model_dir, seed=version)
        result = await sender.push(weights_of(policy), policy_version=version, prober=prober_of(policy))
        assert result.failed == {}
        assert set(result.members) == {member.replica_id for member in replicas}
        totals.append(result.total_s)
        standstills.append(result.standstill_s)

    await push(0)
    async with contextlib.AsyncExitStack() as stack:
        sampled = [
            await stack.enter_async_context(kept_busy(member, num_requests=4, max_tokens=100)) for member in replicas
        ]
        for version in range(1, num_pushes + 1):
            await push(version)
    await sender.close()
    num_tokens, worst = 0, 0.0
    for member, completions in zip(replicas, sampled, strict=True):
        checked = check_spans(completions, lambda version: make_policy(model_dir, seed=version))
        assert checked.versions <= set(range(num_pushes + 1))
        assert len(checked.versions) > num_pushes / 2, f"{member.replica_id} had no work during most pushes"
        assert checked.num_crossings > num_pushes, "hardly a completion was under way when weights changed"
        num_tokens += checked.num_tokens
        worst = max(worst, checked.worst)
    assert num_tokens == sum(len(completion.sample.token_ids) for completions in sampled for completion in completions)
    log.info(
        "%d pushes, medians: %.0f ms, standstill %.0f ms; %d tokens checked, largest difference of a logprob %.2e nats",
        num_pushes,
        1000 * statistics.median(totals),
        1000 * statistics.median(standstills),
        num_tokens,
        worst,
    )
    assert worst <= MAX_DIFFERENCE
