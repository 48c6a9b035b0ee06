"""Pushes under load to replicas with a real vLLM, and checks that every token was sampled with the weights of its span.

The weights of different versions are unrelated. If a token names the wrong one, or its keys and values are from
another, its logprob is off by nats.
"""

import contextlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from services.trainer.push.weight_sender import WeightSender
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.weights.known_weights import make_policy, prober_of, weights_of
from tests.weights.replica import ReplicaProcess
from tests.weights.spans import check_spans, kept_busy


async def push_many_under_load(
    sender: WeightSender,
    replicas: Sequence[ReplicaProcess],
    *,
    num_pushes: int,
    model_dir: Path,
    redis: Redis,
    run_keys: RunKeys,
    max_difference: float,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tolerance: float = 0.05,
) -> str:
    """Push version after version while the replicas sample, check every token, and return what was measured.

    Args:
        sender: It is closed at the end.
        replicas: They receive every version.
        num_pushes: Pushes under load, after a first one without.
        model_dir: The architecture.
        redis: Where replicas are registered.
        run_keys: Keys of the run.
        max_difference: Largest difference of a logprob, in nats.
        dtype: In which the engines hold the weights. The check computes with the rounded weights in float32.
        device: Where the weights are when they are pushed.
        tolerance: That of the probe after each push, in nats.
    """
    for member in replicas:
        await member.attach()
        await member.register(redis, run_keys)
    totals: list[float] = []
    standstills: list[float] = []

    def policy_of(version: int) -> Any:
        policy: Any = make_policy(model_dir, seed=version)
        return policy.to(dtype).float()

    async def push(version: int) -> None:
        pushed = policy_of(version).to(device=device, dtype=dtype)
        prober = prober_of(policy_of(version), tolerance=tolerance)
        result = await sender.push(weights_of(pushed), policy_version=version, prober=prober)
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
        checked = check_spans(completions, policy_of)
        assert checked.versions <= set(range(num_pushes + 1))
        assert len(checked.versions) > num_pushes / 2, f"{member.replica_id} had no work during most pushes"
        assert checked.num_crossings > num_pushes, "hardly a completion was under way when weights changed"
        num_tokens += checked.num_tokens
        worst = max(worst, checked.worst)
    assert num_tokens == sum(len(completion.sample.token_ids) for completions in sampled for completion in completions)
    assert worst <= max_difference
    return (
        f"{num_pushes} pushes, medians: {1000 * statistics.median(totals):.0f} ms, "
        f"standstill {1000 * statistics.median(standstills):.0f} ms; {num_tokens} tokens checked, "
        f"largest difference of a logprob {worst:.2e} nats"
    )
