"""Chapter 4: a push. How new weights get from the trainer to the generators.

The trainer announces a push to every generator over HTTP, broadcasts the bytes, and asks each generator to load them. A
generator goes on sampling while the bytes arrive, and pauses only to swap the weights. Afterwards the trainer requires
the new version: a generator that does not have it takes no prompts. If the transfer fails, the old weights stay in use.

The generators of these tests have a fake engine without a model. HTTP, Redis and the broadcast are real. The code is
in services/trainer/push/ and services/generator/receive/.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

pytest.importorskip("torch")

import torch

from services.trainer.fence import take_over
from services.trainer.push.weight_sender import WeightSender
from shared.errors import FencedError
from shared.lineage import NO_WEIGHTS, LineageVersion
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.weights.senders import make_quick_sender
from tests.weights.served_receiver import ServedReceiver, serve
from tests.weights.small_pushes import holds, required, weights
from tests.weights.uncommitted import abort, attempt_on, begin

pytestmark = pytest.mark.unit


@pytest.fixture
async def incarnation(redis: Redis, run_keys: RunKeys) -> int:
    """Return the number of the run's trainer."""
    return await take_over(redis, run_keys)


@pytest.fixture
async def sender(redis: Redis, incarnation: int) -> AsyncIterator[WeightSender]:
    """Return the trainer's end of the push."""
    sender = make_quick_sender(redis, incarnation)
    yield sender
    await sender.close()


@pytest.fixture
async def one(redis: Redis, run_keys: RunKeys) -> AsyncIterator[ServedReceiver]:
    """Return a generator's end of the push, registered for the run."""
    async with serve("generator-1") as served:
        await served.register(redis, run_keys)
        yield served


@pytest.fixture
async def two(redis: Redis, run_keys: RunKeys) -> AsyncIterator[ServedReceiver]:
    """Return the end of a second generator."""
    async with serve("generator-2") as served:
        await served.register(redis, run_keys)
        yield served


async def test_a_push_reaches_every_generator_and_then_the_version_is_required(
    redis: Redis, run_keys: RunKeys, sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    assert await sender.needs_push()
    result = await sender.push(weights(0.5), policy_version=7)
    assert result.members == ("generator-1", "generator-2")
    assert result.failed == {}
    assert result.is_confirmed
    assert result.num_bytes == 68
    for served in (one, two):
        assert holds(served, 0.5)
        assert served.receiver.held_version.policy_version == 7
        assert not served.receiver.decoding_is_paused
        assert not served.engine.is_paused
    assert await required(redis, run_keys) == 7
    assert not await sender.needs_push()


async def test_prompts_wait_for_the_first_push_and_for_the_required_version(
    incarnation: int, sender: WeightSender, one: ServedReceiver
) -> None:
    waiting = asyncio.create_task(one.receiver.wait_open(NO_WEIGHTS), name="wait for any version")
    later = asyncio.create_task(one.receiver.wait_open(LineageVersion(incarnation, 1)), name="wait for version 1")
    await sender.push(weights(0.0), policy_version=0)
    async with asyncio.timeout(120):
        await waiting
    assert not later.done()
    await sender.push(weights(1.0), policy_version=1)
    async with asyncio.timeout(120):
        await later


async def test_a_generator_samples_until_all_bytes_have_arrived(sender: WeightSender, one: ServedReceiver) -> None:
    await sender.push(weights(0.0), policy_version=0)
    seen: list[bool] = []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for named in weights(1.0)():
            seen.append(one.engine.is_paused or one.receiver.decoding_is_paused)
            yield named

    result = await sender.push(watched, policy_version=1)
    assert result.is_confirmed
    assert seen == [False] * 6
    moves = ["receive", "pause", "load", "name_version", "read_version", "resume"]
    assert one.engine.calls[-len(moves) :] == moves


async def test_a_generator_that_joins_late_gets_the_newest_weights_in_another_push(
    redis: Redis, run_keys: RunKeys, sender: WeightSender, one: ServedReceiver
) -> None:
    await sender.push(weights(0.0), policy_version=3)
    assert not await sender.needs_push()
    async with serve("generator-9") as late:
        await late.register(redis, run_keys)
        assert await sender.needs_push()
        result = await sender.push(weights(0.0), policy_version=3)
        assert result.members == ("generator-1", "generator-9")
        assert holds(late, 0.0)
        assert one.receiver.info().epoch == late.receiver.info().epoch == result.communicator_epoch


async def test_weights_that_arrived_but_were_never_confirmed_are_not_used(
    sender: WeightSender, one: ServedReceiver
) -> None:
    assert (await sender.push(weights(0.0), policy_version=0)).is_confirmed
    async with attempt_on(one) as attempt:
        await attempt.broadcast(await begin(attempt, weights(0.5)))
        info = await abort(attempt)
    assert holds(one, 0.0)
    assert one.engine.version.endswith(":0")
    assert (info.epoch, info.policy_version, info.is_held) == (0, 0, False)
    assert not one.engine.is_paused


@pytest.mark.parametrize("failing", ["failing", "failing_late"])
async def test_after_a_failed_transfer_the_old_weights_are_used_under_their_own_version(
    failing: str, redis: Redis, run_keys: RunKeys, sender: WeightSender, one: ServedReceiver
) -> None:
    assert (await sender.push(weights(0.0), policy_version=0)).is_confirmed
    setattr(one.engine, failing, {"receive"})
    result = await sender.push(weights(1.0), policy_version=1)
    assert not result.is_confirmed
    assert "out of memory" in result.failed["generator-1"]
    assert holds(one, 0.0)
    assert one.engine.version.endswith(":0")
    assert (one.receiver.held_version.policy_version, one.receiver.decoding_is_paused, one.engine.is_paused) == (
        0,
        False,
        False,
    )
    assert one.engine.calls.count("pause") == 1
    assert await required(redis, run_keys) == 1
    assert not one.receiver.is_open(one.receiver.held_version._replace(policy_version=1)), "it takes no prompts"
    setattr(one.engine, failing, set[str]())
    assert (await sender.push(weights(1.0), policy_version=1)).is_confirmed
    assert holds(one, 1.0)
    assert one.receiver.is_open(one.receiver.held_version)


async def test_a_generator_that_cannot_load_does_not_hold_up_the_others_and_recovers_at_the_next_push(
    sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    assert (await sender.push(weights(1.0), policy_version=0)).members == ("generator-1", "generator-2")
    two.engine.failing = {"load"}
    result = await sender.push(weights(2.0), policy_version=1)
    assert result.members == ("generator-1",)
    assert "out of memory" in result.failed["generator-2"]
    assert not result.is_confirmed
    assert holds(one, 2.0)
    assert one.engine.calls.count("load") == 2
    assert one.receiver.info().epoch == result.communicator_epoch
    assert (two.receiver.held_version.policy_version, two.receiver.decoding_is_paused, two.engine.is_paused) == (
        -1,
        True,
        True,
    )
    assert not two.receiver.fatal.is_set()
    two.engine.failing = set()
    healed = await sender.push(weights(2.0), policy_version=1)
    assert healed.members == ("generator-1", "generator-2")
    assert healed.communicator_epoch > result.communicator_epoch
    assert holds(two, 2.0)
    assert not two.engine.is_paused


async def test_a_required_version_that_redis_has_lost_is_written_again(
    redis: Redis, run_keys: RunKeys, sender: WeightSender, one: ServedReceiver
) -> None:
    await sender.require_pushed()
    assert await required(redis, run_keys) is None, "nothing was pushed yet"
    await sender.push(weights(0.0), policy_version=7)
    await redis.delete(run_keys.required_version)
    await sender.require_pushed()
    assert await required(redis, run_keys) == 7


async def test_a_superseded_trainer_cannot_push(
    redis: Redis, run_keys: RunKeys, sender: WeightSender, one: ServedReceiver
) -> None:
    await sender.push(weights(0.0), policy_version=0)
    await redis.incr(run_keys.epoch)
    with pytest.raises(FencedError, match="superseded"):
        await sender.push(weights(1.0), policy_version=1)
    assert one.receiver.held_version.policy_version == 0
    assert await required(redis, run_keys) == 0
