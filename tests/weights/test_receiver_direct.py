"""Weights received directly into a real vLLM's model: damage in transit is found before they are served."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from services.trainer.push.packing import Parcel, SentDigests, Weights, announce
from services.trainer.push.replicas import Member, Replica
from services.trainer.push.weight_sender import WeightSender
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.weights.parameter_spec import total_bytes
from tests.weights.known_weights import PROMPT_IDS, logprobs_of, make_policy, weights_of
from tests.weights.replica import HEADERS, ReplicaProcess
from tests.weights.uncommitted import epochs_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


async def test_damage_spoils_the_replica_until_the_next_push(
    redis: Redis, run_keys: RunKeys, sender: WeightSender, incarnation: int, replica: ReplicaProcess, model_dir: Path
) -> None:
    await replica.register(redis, run_keys)
    await replica.attach(push_staging="none")
    first = make_policy(model_dir, seed=1)
    assert (await sender.push(weights_of(first), policy_version=1)).is_confirmed
    assert replica.info().staged_checksum is None

    second = make_policy(model_dir, seed=2)
    reason = await push_damaged(replica, weights_of(second), incarnation=incarnation + 1)
    assert "is not what the trainer sent: the checksum is" in reason
    info = replica.info()
    assert (info.policy_version, info.is_held) == (-1, True)

    await replica.attach(push_staging="none")  # the epoch above is newer than any epoch of the sender
    result = await sender.push(weights_of(second), policy_version=2)
    assert result.failed == {}
    sample = await replica.sample(PROMPT_IDS, max_tokens=16)
    expected = logprobs_of(second, PROMPT_IDS, sample.token_ids)
    assert max(abs(mine - theirs) for mine, theirs in zip(sample.logprobs, expected, strict=True)) < 1e-3


async def push_damaged(replica: ReplicaProcess, weights: Weights, *, incarnation: int) -> str:
    """Push with one changed byte, and return why the replica refuses to commit."""
    announced = announce(weights())

    def damaged() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(weights()):
            one = tensor.detach().clone()
            if number == 3:
                one.view(-1)[0] += 1
            yield name, one

    deadline = time.monotonic() + 20.0
    async with httpx.AsyncClient(headers=HEADERS, trust_env=False, timeout=120) as client:
        members = {replica.replica_id: Member(Replica(replica.replica_id, replica.url, client), replica.info())}
        epochs = epochs_of(incarnation, members, buffer_bytes=20_000)
        await epochs.join(members, weight_dir=None, deadline=deadline)
        parcel = Parcel(2, announced, "full", damaged, total_bytes(announced))
        await epochs.begin(members, parcel, deadline=deadline)
        whole = Parcel(2, announced, "full", weights, total_bytes(announced))
        await epochs.broadcast(members, parcel, deadline=deadline)
        _, failed = await epochs.commit(
            members, policy_version=2, checksum=checksum_of(whole), probe=None, deadline=deadline
        )
    epochs.close()
    return failed[replica.replica_id]


def checksum_of(parcel: Parcel) -> str:
    """Return the checksum of a parcel's content."""
    digests = SentDigests()
    for _ in digests.watching(parcel.tensors()):
        pass
    return digests.checksum()
