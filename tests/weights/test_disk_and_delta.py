"""Pushes of deltas, and pushes through a directory, to a real vLLM.

From version to version, a fifth of all numbers is replaced, at random places. That is enough for a mix-up to show, and
few enough for a delta to be smaller than the weights.
"""

import copy
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from services.trainer.push.disk_writer import DiskWriter
from services.trainer.push.packing import Parcel
from services.trainer.push.weight_sender import WeightSender
from shared.control import DiskPlace
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.weights.weight_manifest import Manifest, read_manifest
from shared.weights.weight_store import WeightStore
from tests.weights.known_weights import (
    PROMPT_IDS,
    adapters_of,
    make_adapter_policy,
    make_policy,
    weights_of,
)
from tests.weights.replica import RUN_ID, ReplicaProcess
from tests.weights.senders import make_sender
from tests.weights.spans import MAX_DIFFERENCE, check, check_spans, kept_busy

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

log = logging.getLogger(__name__)


def successors(model_dir: Path, *, count: int) -> list[Qwen3ForCausalLM]:
    """Return policies in which each is a changed copy of the previous one."""
    policies = [make_policy(model_dir, seed=50)]
    for seed in range(51, 50 + count):
        policy = copy.deepcopy(policies[-1])
        other = dict(make_policy(model_dir, seed=seed).named_parameters())
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                parameter.copy_(torch.where(torch.rand_like(parameter) < 0.2, other[name], parameter))
        policies.append(policy)
    return policies


def adapter_weights_of(policy: Any) -> Callable[[], Iterable[tuple[str, torch.Tensor]]]:
    return lambda: adapters_of(policy).items()


def versions_in(weight_dir: Path) -> list[Manifest]:
    store = WeightStore(str(weight_dir / RUN_ID))
    return [read_manifest(store, name) for name in store.names()]


@pytest.fixture
async def disk_sender(redis: Redis, incarnation: int, tmp_path: Path) -> AsyncIterator[WeightSender]:
    """Return a sender that writes to ``tmp_path``."""
    sender = make_sender(redis, incarnation, transport="disk", encoding="auto", weight_dir=str(tmp_path))
    yield sender
    await sender.close()


@pytest.fixture(params=["disk", "gloo"])
async def changes_sender(
    redis: Redis, incarnation: int, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[WeightSender]:
    """Return a sender of deltas, over either transport."""
    if request.param == "disk":
        sender = make_sender(redis, incarnation, transport="disk", encoding="auto", weight_dir=str(tmp_path))
    else:
        sender = make_sender(redis, incarnation, transport="gloo", encoding="delta")
    yield sender
    await sender.close()


async def test_every_span_sampled_under_load_matches_the_version_it_names(
    replica: ReplicaProcess, model_dir: Path, redis: Redis, run_keys: RunKeys, changes_sender: WeightSender
) -> None:
    sender = changes_sender
    await replica.attach()  # whatever options the previous test has left
    await replica.register(redis, run_keys)
    policies = successors(model_dir, count=5)
    first = await sender.push(weights_of(policies[0]), policy_version=0)
    assert first.failed == {}
    full = first.num_bytes
    assert full == sum(parameter.nbytes for parameter in policies[0].parameters())
    async with kept_busy(replica, num_requests=4) as completions:
        for version in range(1, 5):
            await replica.sample(PROMPT_IDS, max_tokens=20)
            result = await sender.push(weights_of(policies[version]), policy_version=version)
            assert result.failed == {}
            assert result.num_bytes < 0.7 * full
            total_ms, standstill_ms = round(1000 * result.total_s), round(1000 * result.standstill_s)
            log.info("%d of %d bytes, push %d ms, standstill %d ms", result.num_bytes, full, total_ms, standstill_ms)
    checked = check_spans(completions, dict(enumerate(policies)).__getitem__)
    assert checked.num_crossings, "no push fell into a completion; nothing was tested"
    assert checked.worst <= MAX_DIFFERENCE
    assert not await sender.needs_push()


@pytest.mark.long  # it starts an engine; test_disk_states.py does this without one
async def test_a_late_replica_reads_the_chain_and_the_other_does_not_notice(
    replica: ReplicaProcess,
    mortal: ReplicaProcess,
    model_dir: Path,
    redis: Redis,
    run_keys: RunKeys,
    disk_sender: WeightSender,
    tmp_path: Path,
) -> None:
    await replica.register(redis, run_keys)
    policies = successors(model_dir, count=3)
    for version, policy in enumerate(policies):
        assert (await disk_sender.push(weights_of(policy), policy_version=version)).is_confirmed
    assert [version.encoding for version in versions_in(tmp_path)] == ["full", "delta", "delta"]
    epoch = replica.info().epoch

    await mortal.attach()
    await mortal.register(redis, run_keys)
    assert await disk_sender.needs_push()
    result = await disk_sender.push(weights_of(policies[-1]), policy_version=2)
    assert result.failed == {}
    assert set(result.members) == {"generator-1", "generator-2"}
    assert result.num_bytes == 0
    assert len(versions_in(tmp_path)) == 3
    assert (replica.info().epoch, mortal.info().epoch) == (epoch, epoch)
    for member in (replica, mortal):
        await check(member, policies[-1], version=2)
    assert not await disk_sender.needs_push()


async def test_after_a_damaged_file_the_old_version_is_served_until_a_full_one_is_written(
    replica: ReplicaProcess,
    model_dir: Path,
    redis: Redis,
    run_keys: RunKeys,
    disk_sender: WeightSender,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await replica.register(redis, run_keys)
    policies = successors(model_dir, count=2)
    assert (await disk_sender.push(weights_of(policies[0]), policy_version=0)).is_confirmed
    publish = DiskWriter.publish

    def publish_and_damage(writer: DiskWriter, parcel: Parcel) -> DiskPlace:
        place = publish(writer, parcel)
        file = tmp_path / RUN_ID / place.name / "weights-00001-of-00001.safetensors"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        return place

    with monkeypatch.context() as patch:
        patch.setattr(DiskWriter, "publish", publish_and_damage)
        result = await disk_sender.push(weights_of(policies[1]), policy_version=1)
    assert not result.is_confirmed
    assert "is damaged: its checksum differs from the manifest's" in result.failed[replica.replica_id]
    assert not replica.info().is_held
    await check(replica, policies[0], version=0)

    healed = await disk_sender.push(weights_of(policies[1]), policy_version=1)
    assert healed.failed == {}
    assert versions_in(tmp_path)[-1].encoding == "full"
    await check(replica, policies[1], version=1)


async def test_adapters_are_read_from_disk_too(
    adapter_replica: ReplicaProcess,
    tied_model_dir: Path,
    redis: Redis,
    run_keys: RunKeys,
    disk_sender: WeightSender,
) -> None:
    await adapter_replica.register(redis, run_keys)
    for version in range(3):
        policy = make_adapter_policy(tied_model_dir, seed=20 + version)
        result = await disk_sender.push(adapter_weights_of(policy), policy_version=version)
        assert result.failed == {}
        await check(adapter_replica, policy, version=version)
