"""Streams in difficulty: superseded trainers, consumers that cannot go on, lost replies, and lost state.

tests/fundamentals/test_a_stream.py has the promises in normal operation.
"""

from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.errors import FencedError, StateLostError
from shared.redis import streams
from shared.redis.keys import GENERATORS, REWARDERS, RunKeys
from shared.redis.lease import alive, lease, renew
from shared.redis.redis_connection import Redis, call
from shared.redis.streams import give_back
from tests.shared.redis.prompts_stream import admit, generator

pytestmark = pytest.mark.unit


async def test_a_trainer_of_an_older_epoch_can_no_longer_admit(redis: Redis, run_keys: RunKeys) -> None:
    await redis.set(run_keys.epoch, 5)
    with pytest.raises(FencedError, match="incarnation 4 was superseded by 5"):
        await admit(redis, run_keys, "00000000", incarnation=4)
    assert await admit(redis, run_keys, "00000000", incarnation=5)


async def test_entries_that_are_given_back_go_to_others_although_the_lease_is_kept(
    redis: Redis, run_keys: RunKeys
) -> None:
    for number in range(3):
        await admit(redis, run_keys, f"{number:08d}")
    async with lease(redis, leases=run_keys.leases(GENERATORS), consumer="unable", lease_s=60):
        had = await generator(redis, run_keys, "unable").read(count=2, block_s=0.1)
        await give_back(redis, stream=run_keys.prompts, consumer_group=GENERATORS, name="unable")
        assert await generator(redis, run_keys, "unable").read_own(count=8) == []
        other = generator(redis, run_keys, "other")
        found = [*await other.read(count=8, block_s=0.1), *await other.read(count=8, block_s=0.1)]
    assert [delivery.group_id for delivery in found] == [*(delivery.group_id for delivery in had), "00000002"]


async def test_a_consumer_gives_back_what_it_does_not_work_on_and_may_get_it_again(
    redis: Redis, run_keys: RunKeys
) -> None:
    for number in range(3):
        await admit(redis, run_keys, f"{number:08d}")
    consumer = generator(redis, run_keys)
    first, second, third = await consumer.read(count=3, block_s=0.1)
    await consumer.give_back(keep={second.entry_id})
    again = await consumer.read(count=8, block_s=0.1)
    assert [delivery.entry_id for delivery in again] == [first.entry_id, third.entry_id]
    pending = await redis.xpending_range(run_keys.prompts, GENERATORS, min="-", max="+", count=8)
    assert [item["times_delivered"] for item in pending] == [1, 1, 1], "nothing died of them"
    assert await second.hand_off(run_keys.completions, run_keys.seen(run_keys.completions), b"done")


async def test_entries_of_which_a_consumer_may_have_died_count_as_delivered_when_it_gives_them_back(
    redis: Redis, run_keys: RunKeys
) -> None:
    await admit(redis, run_keys, "00000000")
    await generator(redis, run_keys).read(count=1, block_s=0.1)
    await generator(redis, run_keys).give_back()  # its next life, which has not read it
    (found,) = await generator(redis, run_keys, "other").read(count=1, block_s=0.1)
    (pending,) = await redis.xpending_range(run_keys.prompts, GENERATORS, min="-", max="+", count=8)
    assert (found.group_id, pending["times_delivered"]) == ("00000000", 2)


async def test_giving_back_entries_of_a_deleted_run_does_nothing(redis: Redis) -> None:
    await give_back(redis, stream=RunKeys("gone").prompts, consumer_group=GENERATORS, name="unable")


async def test_a_zombie_cannot_bury_what_another_consumer_took_over(redis: Redis, run_keys: RunKeys) -> None:
    await admit(redis, run_keys, "00000000")
    (zombie,) = await generator(redis, run_keys, "zombie").read(count=1, block_s=0.1)
    (living,) = await generator(redis, run_keys, "living").read(count=1, block_s=0.1)
    await zombie.bury("it looked broken")
    assert await redis.xlen(run_keys.dead) == 0
    assert await living.hand_off(run_keys.completions, run_keys.seen(run_keys.completions), b"fine")


async def test_a_trainer_brings_nothing_of_a_lost_run_back_to_life(redis: Redis, run_keys: RunKeys) -> None:
    await redis.delete(*run_keys.everything())
    with pytest.raises(StateLostError, match="epoch does not exist"):
        await call(redis, "headrace_require", keys=(run_keys.epoch, run_keys.required_version), args=(1, "1:4"))
    with pytest.raises(StateLostError, match="epoch does not exist"):
        await call(redis, "headrace_write_run", keys=(run_keys.epoch, run_keys.run), args=(1, "status", "running"))
    await redis.set(run_keys.epoch, 1)
    with pytest.raises(StateLostError, match="run does not exist"):
        await call(redis, "headrace_write_run", keys=(run_keys.epoch, run_keys.run), args=(1, "status", "running"))
    assert await redis.exists(run_keys.run, run_keys.required_version) == 0


async def test_reclaimed_entries_in_a_reply_that_was_lost_are_found(
    redis: Redis, run_keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    await admit(redis, run_keys, "00000000")
    await generator(redis, run_keys, "dead").read(count=1, block_s=0.1)
    consumer = generator(redis, run_keys, "living")
    fcall = cast("Any", redis).fcall

    async def lose_the_reply(*args: Any) -> None:
        await fcall(*args)
        raise RedisConnectionError("connection reset by peer")

    monkeypatch.setattr(redis, "fcall", lose_the_reply)
    assert await consumer.read(count=1, block_s=0.05) == []
    monkeypatch.setattr(redis, "fcall", fcall)

    (found,) = await consumer.read(count=1, block_s=0.1)
    assert found.group_id == "00000000"


async def test_a_consumer_takes_no_more_of_the_dead_than_it_has_room_for(redis: Redis, run_keys: RunKeys) -> None:
    for number in range(8):
        await admit(redis, run_keys, f"{number:08d}")
    assert len(await generator(redis, run_keys, "dead").read(count=8, block_s=0.1)) == 8
    async with lease(redis, leases=run_keys.leases(GENERATORS), consumer="slow", lease_s=60):
        slow, fast = (generator(redis, run_keys, name, reclaim_every_s=3600.0) for name in ("slow", "fast"))
        (first,) = await slow.read(count=1, block_s=0.1)
        rest = await fast.read(count=6, block_s=0.1)
        (last,) = await fast.read(count=8, block_s=0.1)
    found = [first, *rest, last]
    assert [delivery.group_id for delivery in found] == [f"{number:08d}" for number in range(8)]


async def test_an_expired_lease_is_not_alive(redis: Redis, run_keys: RunKeys) -> None:
    await renew(redis, leases=run_keys.leases(REWARDERS), consumer="dead", lease_s=-1)
    await renew(redis, leases=run_keys.leases(REWARDERS), consumer="living", lease_s=60)
    assert await alive(redis, leases=run_keys.leases(REWARDERS)) == {"living"}


async def test_entries_in_a_reply_that_was_lost_are_found_without_counting_as_delivered_again(
    redis: Redis, run_keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = generator(redis, run_keys)
    await admit(redis, run_keys, "00000000")
    (in_work,) = await consumer.read(count=1, block_s=0.1)
    await admit(redis, run_keys, "00000001")
    xreadgroup: Any = redis.xreadgroup

    async def lose_the_reply(*args: Any, **kwargs: Any) -> None:
        await xreadgroup(*args, **kwargs)
        raise RedisConnectionError("connection reset by peer")

    monkeypatch.setattr(redis, "xreadgroup", lose_the_reply)
    assert await consumer.read(count=1, block_s=0.1) == []
    monkeypatch.setattr(redis, "xreadgroup", xreadgroup)

    (found,) = await consumer.read(count=8, block_s=0.1)
    assert found.group_id == "00000001"
    pending = await redis.xpending_range(run_keys.prompts, GENERATORS, min="-", max="+", count=8)
    assert [item["times_delivered"] for item in pending] == [1, 1]
    assert await in_work.hand_off(run_keys.completions, run_keys.seen(run_keys.completions), b"done")


async def test_entries_in_a_lost_reply_are_found_behind_many_that_are_in_hand(
    redis: Redis, run_keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_MAX_PENDING", 2)
    for number in range(7):
        await admit(redis, run_keys, f"{number:08d}")
    consumer = generator(redis, run_keys)
    assert len(await consumer.read(count=4, block_s=0.1)) == 4
    xreadgroup: Any = redis.xreadgroup

    async def lose_the_reply(*args: Any, **kwargs: Any) -> None:
        await xreadgroup(*args, **kwargs)
        raise RedisConnectionError("connection reset by peer")

    with monkeypatch.context() as lossy:
        lossy.setattr(redis, "xreadgroup", lose_the_reply)
        assert await consumer.read(count=3, block_s=0.1) == []
    found = await consumer.read(count=8, block_s=0.1)
    assert [delivery.group_id for delivery in found] == ["00000004", "00000005", "00000006"]


async def test_a_redis_that_is_wiped_after_a_reply_was_lost_is_reported_as_lost_state(
    redis: Redis, run_keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = generator(redis, run_keys)

    async def lose_the_reply(*_args: Any, **_kwargs: Any) -> None:
        raise RedisConnectionError("connection reset by peer")

    assert await consumer.read(count=1, block_s=0.05) == []
    with monkeypatch.context() as lossy:
        lossy.setattr(redis, "xreadgroup", lose_the_reply)
        assert await consumer.read(count=1, block_s=0.05) == []
    await redis.delete(*run_keys.everything())
    with pytest.raises(StateLostError, match="wiped"):
        await consumer.read(count=1, block_s=0.1)
