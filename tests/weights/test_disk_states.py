"""Pushes through a directory, and pushes of deltas: real files, HTTP and Redis, and engines without a model."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from services.trainer.push.disk_writer import DiskWriter
from services.trainer.push.packing import Parcel
from services.trainer.push.prober import Prober
from services.trainer.push.weight_sender import WeightSender
from shared.control import DiskPlace
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.weights.weight_manifest import Manifest, read_manifest
from shared.weights.weight_store import WeightStore
from tests.weights.fake_engine import PROBE_LOGPROBS
from tests.weights.replica import RUN_ID
from tests.weights.senders import make_sender
from tests.weights.served_receiver import ServedReceiver, serve

Weights = Callable[[], Iterable[tuple[str, torch.Tensor]]]


def weights(version: int) -> Weights:
    """Return weights of which a hundredth changes from version to version."""
    wide = torch.zeros(100, 100)
    for earlier in range(version + 1):
        wide[earlier] = float(earlier + 1)
    named = {"wide": wide, "norm": torch.full((3,), float(version))}
    return lambda: named.items()


def holds(served: ServedReceiver, version: int) -> bool:
    found = served.engine.weights
    expected = dict(weights(version)())
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def written(weight_dir: Path) -> list[Manifest]:
    store = WeightStore(str(weight_dir / RUN_ID))
    return [read_manifest(store, name) for name in store.names()]


@pytest.fixture
async def one(redis: Redis, run_keys: RunKeys) -> AsyncIterator[ServedReceiver]:
    async with serve("generator-1") as served:
        await served.register(redis, run_keys)
        yield served


@pytest.fixture
async def sender(redis: Redis, incarnation: int, tmp_path: Path) -> AsyncIterator[WeightSender]:
    sender = make_sender(redis, incarnation, transport="disk", encoding="auto", weight_dir=str(tmp_path))
    yield sender
    await sender.close()


async def test_versions_follow_each_other_as_deltas_and_old_ones_go(
    one: ServedReceiver, sender: WeightSender, tmp_path: Path
) -> None:
    num_bytes: list[int] = []
    for version in range(4):
        result = await sender.push(weights(version), policy_version=version)
        assert result.failed == {}
        assert (result.fleet.transport, result.fleet.why_transport) == ("disk", "the run says weight_transport: disk")
        assert holds(one, version)
        num_bytes.append(result.num_bytes)
    assert [manifest.encoding for manifest in written(tmp_path)] == ["full", "delta", "delta", "delta"]
    assert max(num_bytes[1:]) < 1_000 < num_bytes[0]
    assert one.engine.calls.count("enter") == 1
    assert not await sender.needs_push()


async def test_a_late_replica_is_the_only_one_that_reads(
    one: ServedReceiver, sender: WeightSender, redis: Redis, run_keys: RunKeys, tmp_path: Path
) -> None:
    for version in range(3):
        await sender.push(weights(version), policy_version=version)
    calls = list(one.engine.calls)
    async with serve("generator-2") as late:
        await late.register(redis, run_keys)
        assert await sender.needs_push()
        result = await sender.push(weights(2), policy_version=2)
        assert (result.failed, set(result.members)) == ({}, {"generator-1", "generator-2"})
        assert holds(late, 2)
        assert one.engine.calls == calls
        assert len(written(tmp_path)) == 3
        assert not await sender.needs_push()
        result = await sender.push(weights(3), policy_version=3)
        assert set(result.members) == {"generator-1", "generator-2"}
        assert holds(one, 3)
        assert holds(late, 3)
    assert written(tmp_path)[-1].encoding == "delta"


async def test_a_late_replica_that_fails_costs_the_others_nothing(
    one: ServedReceiver, sender: WeightSender, redis: Redis, run_keys: RunKeys
) -> None:
    await sender.push(weights(0), policy_version=0)
    async with serve("generator-2") as late:
        late.engine.failing_late = {"receive"}
        await late.register(redis, run_keys)
        result = await sender.push(weights(0), policy_version=0)
        assert result.members == ("generator-1",)
        assert set(result.failed) == {"generator-2"}
        assert one.engine.calls.count("receive") == 1
        late.engine.failing_late = set()
        result = await sender.push(weights(0), policy_version=0)
        assert result.failed == {}
        assert holds(late, 0)
        assert one.engine.calls.count("receive") == 1


async def test_a_version_that_was_written_for_an_attempt_that_failed_counts_once(
    one: ServedReceiver, sender: WeightSender, redis: Redis, run_keys: RunKeys, tmp_path: Path
) -> None:
    async with serve("generator-2") as two:
        await two.register(redis, run_keys)
        two.engine.failing = {"enter"}
        result = await sender.push(weights(0), policy_version=0)
    assert result.members == ("generator-1",)
    assert set(result.failed) == {"generator-2"}
    assert holds(one, 0)
    assert len(written(tmp_path)) == 1
    assert result.num_bytes == 4 * (100 * 100 + 3)


async def test_a_version_number_that_comes_again_with_other_weights_is_read_again(
    one: ServedReceiver, sender: WeightSender, redis: Redis, run_keys: RunKeys, incarnation: int, tmp_path: Path
) -> None:
    for version in range(2):
        await sender.push(weights(version), policy_version=version)
    await redis.set(run_keys.epoch, incarnation + 1)
    heir = make_sender(redis, incarnation + 1, transport="disk", encoding="auto", weight_dir=str(tmp_path))
    assert await heir.needs_push()
    result = await heir.push(weights(5), policy_version=1)
    await heir.close()
    assert result.failed == {}
    assert holds(one, 5)
    # The directories of the predecessor are gone.
    assert [manifest.encoding for manifest in written(tmp_path)] == ["full"]


async def test_no_replica_serves_a_damaged_version_and_the_next_push_writes_a_full_version(
    one: ServedReceiver, sender: WeightSender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sender.push(weights(0), policy_version=0)
    publish = DiskWriter.publish

    def publish_and_damage(writer: DiskWriter, parcel: Parcel) -> DiskPlace:
        place = publish(writer, parcel)
        (tmp_path / RUN_ID / place.name / "weights-00001-of-00001.safetensors").write_bytes(b"rust")
        return place

    with monkeypatch.context() as patch:
        patch.setattr(DiskWriter, "publish", publish_and_damage)
        result = await sender.push(weights(1), policy_version=1)
    assert not result.is_confirmed
    assert "weights-00001-of-00001.safetensors has 4 bytes and should have" in result.failed["generator-1"]
    assert (one.receiver.decoding_is_paused, one.receiver.held_version.policy_version) == (False, 0)
    assert holds(one, 0)
    healed = await sender.push(weights(1), policy_version=1)
    assert healed.failed == {}
    assert holds(one, 1)
    assert written(tmp_path)[-1].encoding == "full"


async def test_a_directory_that_cannot_be_written_fails_the_push_and_not_the_run(
    one: ServedReceiver, sender: WeightSender, tmp_path: Path
) -> None:
    (tmp_path / RUN_ID).write_text("a file where the directory should be")
    result = await sender.push(weights(0), policy_version=0)
    assert not result.is_confirmed
    assert "weights cannot be written to" in result.failed["generator-1"]
    assert one.engine.calls == []
    (tmp_path / RUN_ID).unlink()
    result = await sender.push(weights(0), policy_version=0)
    assert result.is_confirmed
    assert holds(one, 0)


async def test_deltas_travel_over_gloo_once_every_member_has_what_they_start_from(
    one: ServedReceiver, redis: Redis, run_keys: RunKeys, incarnation: int
) -> None:
    sender = make_sender(redis, incarnation, encoding="delta")
    full = (await sender.push(weights(0), policy_version=0)).num_bytes
    assert full == 4 * (100 * 100 + 3)
    assert (await sender.push(weights(1), policy_version=1)).num_bytes < full / 10
    assert holds(one, 1)
    assert one.engine.announced["encoding"] == "delta"
    async with serve("generator-2") as late:
        await late.register(redis, run_keys)
        assert (await sender.push(weights(1), policy_version=1)).num_bytes == full
        assert (await sender.push(weights(2), policy_version=2)).num_bytes < full / 10
        for served in (one, late):
            assert holds(served, 2)
    await sender.close()


async def test_a_delta_that_arrives_damaged_is_refused_and_the_next_push_is_full(
    one: ServedReceiver, redis: Redis, incarnation: int
) -> None:
    sender = make_sender(redis, incarnation, encoding="delta")
    full = (await sender.push(weights(0), policy_version=0)).num_bytes
    one.engine.damage_staged = True
    result = await sender.push(weights(1), policy_version=1)
    assert not result.is_confirmed
    assert "is not what the trainer sent: the checksum is" in result.failed["generator-1"]
    assert holds(one, 0)
    one.engine.damage_staged = False
    result = await sender.push(weights(1), policy_version=1)
    assert (result.failed, result.num_bytes) == ({}, full)
    assert holds(one, 1)
    await sender.close()


async def test_a_push_succeeds_if_only_replicas_that_already_have_the_version_survive(
    one: ServedReceiver, sender: WeightSender, redis: Redis, run_keys: RunKeys
) -> None:
    await sender.push(weights(0), policy_version=0)
    async with serve("generator-2") as late:
        late.engine.failing = {"enter"}
        await late.register(redis, run_keys)
        result = await sender.push(weights(0), policy_version=0)
        assert result.members == ("generator-1",)
        assert set(result.failed) == {"generator-2"}
        assert one.engine.calls.count("receive") == 1
        late.engine.failing = set()
        assert (await sender.push(weights(0), policy_version=0)).failed == {}
        assert holds(late, 0)


@pytest.mark.parametrize("fault", ["load", "probe", "unreachable"])
async def test_a_replica_that_fails_for_other_reasons_than_the_files_costs_no_room(
    fault: str, one: ServedReceiver, sender: WeightSender, redis: Redis, run_keys: RunKeys, tmp_path: Path
) -> None:
    prober = Prober(lambda _: PROBE_LOGPROBS, token_ids=[5, 6, 7, 8], tolerance=0.5)
    async with serve("generator-2") as two:
        await two.register(redis, run_keys)
        if fault == "load":
            two.engine.failing = {"load"}
        elif fault == "probe":
            two.engine.spoilt = True
        for version in range(4):
            if fault == "unreachable" and version == 1:
                two.receiver.fatal.set()
            result = await sender.push(weights(version), policy_version=version, prober=prober)
            assert "generator-1" in result.members
            assert ("generator-2" in result.failed) == (fault != "unreachable" or version > 0)
    assert [manifest.encoding for manifest in written(tmp_path)] == ["full", "delta", "delta", "delta"]


@pytest.mark.parametrize("failing", [{"failing": {"load"}}, {"failing_late": {"receive"}}, {"failing": {"enter"}}])
async def test_old_versions_are_removed_though_a_replica_fails_at_every_push(
    failing: dict[str, set[str]], one: ServedReceiver, redis: Redis, run_keys: RunKeys, incarnation: int, tmp_path: Path
) -> None:
    sender = make_sender(redis, incarnation, transport="disk", encoding="full", weight_dir=str(tmp_path))
    async with serve("generator-2") as two:
        await two.register(redis, run_keys)
        for name, moves in failing.items():
            setattr(two.engine, name, moves)
        for version in range(5):
            result = await sender.push(weights(version), policy_version=version)
            assert set(result.failed) == {"generator-2"}
            assert len(written(tmp_path)) <= 3
    await sender.close()
    assert holds(one, 4)


async def test_reading_weights_that_takes_too_long_ends_the_push_and_then_the_reading(
    one: ServedReceiver, redis: Redis, incarnation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(
        redis, incarnation, transport="disk", encoding="auto", weight_dir=str(tmp_path), push_timeout_s=2.0
    )
    num_read = 0

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_read
        for number in range(100):
            num_read += 1
            time.sleep(0.4)  # in a thread, as for a GPU that is slow to copy them
            yield f"layer {number}", torch.zeros(3)

    named: list[tuple[str, torch.Tensor]] = [(f"layer {number}", torch.zeros(3)) for number in range(100)]
    slow_weights = DescribedWeights(slow, named)
    result = await sender.push(slow_weights, policy_version=0)
    assert not result.is_confirmed
    assert "reading the weights did not end by the deadline of the push" in result.failed["generator-1"]
    assert result.total_s < 2 * (2.0 + 3.0) + 20.0
    read_when_it_returned = num_read
    await asyncio.sleep(1.0)
    assert num_read == read_when_it_returned < 30
    # The next push has the time that it may need on a busy machine.
    epochs = sender._epochs  # pyright: ignore[reportPrivateUsage]
    patient = dataclasses.replace(epochs._settings, push_timeout_s=60.0)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(epochs, "_settings", patient)
    monkeypatch.setattr(sender, "_push_timeout_s", 60.0)
    assert (await sender.push(lambda: named, policy_version=0)).is_confirmed
    await sender.close()


class DescribedWeights:
    """Weights that can be described without being read."""

    def __init__(self, read: Weights, named: list[tuple[str, torch.Tensor]]) -> None:
        self._read = read
        self._named = named

    def __call__(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._read()

    def described(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._named
