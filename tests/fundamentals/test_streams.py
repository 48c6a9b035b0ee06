"""How a group travels: admitted once, handed off once, reclaimed from the dead, buried when poisonous.

Read top to bottom; every test is one promise of shared/redis/streams.py on a real Redis.
"""

import contextlib
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.errors import FencedError, MessageError, StateLostError
from shared.messages import decode_prompt_group, encode
from shared.redis.keys import GENERATORS, REWARDERS, RunKeys
from shared.redis.lease import alive, lease, renew
from shared.redis.redis_connection import Redis, call
from shared.redis.streams import StreamConsumer, give_back, settle
from tests.groups import prompt_group
from tests.stream_view import entries

pytestmark = pytest.mark.unit


async def admit(redis: Redis, keys: RunKeys, group_id: str, *, incarnation: int = 1) -> bool:
    added = await call(
        redis,
        "headrace_admit",
        keys=(keys.epoch, keys.prompts, keys.seen(keys.prompts)),
        args=(incarnation, group_id, encode(prompt_group(group_id))),
    )
    return bool(added)


def generator(redis: Redis, keys: RunKeys, name: str = "generator-0") -> StreamConsumer:
    return StreamConsumer(
        redis,
        stream=keys.prompts,
        consumer_group=GENERATORS,
        name=name,
        leases=keys.leases(GENERATORS),
        dead=keys.dead,
        reclaim_every_s=0.0,
    )


async def test_a_group_is_admitted_once_however_often_the_dataset_is_read(redis: Redis, run_keys: RunKeys) -> None:
    assert await admit(redis, run_keys, "00000007")
    assert not await admit(redis, run_keys, "00000007")
    assert await redis.xlen(run_keys.prompts) == 1


async def test_a_trainer_of_an_older_epoch_can_no_longer_admit(redis: Redis, run_keys: RunKeys) -> None:
    await redis.set(run_keys.epoch, 5)
    with pytest.raises(FencedError, match="epoch 4 was superseded by 5"):
        await admit(redis, run_keys, "00000000", incarnation=4)
    assert await admit(redis, run_keys, "00000000", incarnation=5)


async def test_a_hand_off_publishes_downstream_and_leaves_nothing_upstream(redis: Redis, run_keys: RunKeys) -> None:
    await admit(redis, run_keys, "00000000")
    (delivery,) = await generator(redis, run_keys).read(count=8, block_s=0.1)
    assert decode_prompt_group(delivery.payload) == prompt_group("00000000")

    assert await delivery.hand_off(run_keys.completions, run_keys.seen(run_keys.completions), b"completed")

    assert await redis.xlen(run_keys.prompts) == 0
    assert await redis.xlen(run_keys.completions) == 1


async def test_the_second_result_of_a_group_is_dropped(redis: Redis, run_keys: RunKeys) -> None:
    await admit(redis, run_keys, "00000000")
    (slow,) = await generator(redis, run_keys, "slow").read(count=1, block_s=0.1)
    (fast,) = await generator(redis, run_keys, "fast").read(count=1, block_s=0.1)
    assert fast.entry_id == slow.entry_id, "the slow one holds no lease, so it counts as dead"

    assert await fast.hand_off(run_keys.completions, run_keys.seen(run_keys.completions), b"first")
    assert not await slow.hand_off(run_keys.completions, run_keys.seen(run_keys.completions), b"second")

    assert [fields["payload"] for _, fields in await entries(redis, run_keys.completions)] == [b"first"]


async def test_work_of_a_consumer_with_a_lease_is_never_reclaimed(redis: Redis, run_keys: RunKeys) -> None:
    await admit(redis, run_keys, "00000000")
    async with lease(redis, leases=run_keys.leases(GENERATORS), consumer="slow", lease_s=60):
        (delivery,) = await generator(redis, run_keys, "slow").read(count=1, block_s=0.1)
        assert await generator(redis, run_keys, "fast").read(count=1, block_s=0.05) == []
        assert await alive(redis, leases=run_keys.leases(GENERATORS)) == {"slow"}
    assert await alive(redis, leases=run_keys.leases(GENERATORS)) == set(), "given back on the way out"
    (again,) = await generator(redis, run_keys, "fast").read(count=1, block_s=0.1)
    assert again.entry_id == delivery.entry_id


async def test_what_is_given_back_is_for_others_though_the_lease_is_kept(redis: Redis, run_keys: RunKeys) -> None:
    for number in range(3):
        await admit(redis, run_keys, f"{number:08d}")
    async with lease(redis, leases=run_keys.leases(GENERATORS), consumer="unable", lease_s=60):
        had = await generator(redis, run_keys, "unable").read(count=2, block_s=0.1)
        await give_back(redis, stream=run_keys.prompts, consumer_group=GENERATORS, name="unable")
        assert await generator(redis, run_keys, "unable").read_own(count=8) == []
        other = generator(redis, run_keys, "other")
        found = [*await other.read(count=8, block_s=0.1), *await other.read(count=8, block_s=0.1)]
    assert [delivery.group_id for delivery in found] == [*(delivery.group_id for delivery in had), "00000002"]


async def test_nothing_is_given_back_of_a_run_that_is_gone(redis: Redis) -> None:
    await give_back(redis, stream=RunKeys("gone").prompts, consumer_group=GENERATORS, name="unable")


async def test_a_restarted_consumer_first_gets_what_it_had(redis: Redis, run_keys: RunKeys) -> None:
    for number in range(3):
        await admit(redis, run_keys, f"{number:08d}")
    before = await generator(redis, run_keys).read(count=2, block_s=0.1)
    restarted = generator(redis, run_keys)
    after = [*await restarted.read(count=8, block_s=0.1), *await restarted.read(count=8, block_s=0.1)]
    assert [d.group_id for d in after] == [*(d.group_id for d in before), "00000002"]


async def test_an_entry_that_kills_its_consumer_is_buried_on_the_fourth_delivery(
    redis: Redis, run_keys: RunKeys
) -> None:
    await admit(redis, run_keys, "00000000")
    for _ in range(3):  # read, and die of it
        (delivery,) = await generator(redis, run_keys).read(count=1, block_s=0.05)
        assert delivery.group_id == "00000000"
    assert await generator(redis, run_keys).read(count=1, block_s=0.05) == []

    ((_, letter),) = await entries(redis, run_keys.dead)
    assert letter["group_id"] == b"00000000"
    assert letter["reason"] == b"its consumer died 3 times while working on it"
    assert await redis.xlen(run_keys.prompts) == 0


async def test_a_malformed_entry_is_buried_with_its_reason_and_can_be_replayed(redis: Redis, run_keys: RunKeys) -> None:
    await admit(redis, run_keys, "00000000")
    (delivery,) = await generator(redis, run_keys).read(count=1, block_s=0.1)
    async with settle(delivery):
        raise MessageError("no prompt ids")

    ((dead_id, letter),) = await entries(redis, run_keys.dead)
    assert letter["reason"] == b"no prompt ids"
    assert letter["stream"] == run_keys.prompts.encode()
    assert await redis.xpending(run_keys.prompts, GENERATORS) == {
        "pending": 0, "min": None, "max": None, "consumers": [],
    }  # fmt: skip

    await call(redis, "headrace_replay", keys=(run_keys.dead, run_keys.prompts), args=(dead_id,))
    (replayed,) = await generator(redis, run_keys).read(count=1, block_s=0.1)
    assert replayed.payload == delivery.payload
    assert await redis.xlen(run_keys.dead) == 0


async def test_an_unfinished_delivery_stays_pending(redis: Redis, run_keys: RunKeys) -> None:
    await admit(redis, run_keys, "00000000")
    (delivery,) = await generator(redis, run_keys).read(count=1, block_s=0.1)
    with contextlib.suppress(RuntimeError):
        async with settle(delivery):
            raise RuntimeError("the engine died")
    assert (await redis.xpending(run_keys.prompts, GENERATORS))["pending"] == 1
    assert await redis.xlen(run_keys.dead) == 0


async def test_a_zombie_cannot_bury_what_another_consumer_took_over(redis: Redis, run_keys: RunKeys) -> None:
    await admit(redis, run_keys, "00000000")
    (zombie,) = await generator(redis, run_keys, "zombie").read(count=1, block_s=0.1)
    (living,) = await generator(redis, run_keys, "living").read(count=1, block_s=0.1)
    await zombie.bury("it looked broken")
    assert await redis.xlen(run_keys.dead) == 0
    assert await living.hand_off(run_keys.completions, run_keys.seen(run_keys.completions), b"fine")


async def test_a_wiped_redis_is_reported_as_lost_state_and_not_recreated(redis: Redis, run_keys: RunKeys) -> None:
    await redis.delete(*run_keys.everything())
    with pytest.raises(StateLostError, match="wiped"):
        await generator(redis, run_keys).read(count=1, block_s=0.1)
    with pytest.raises(StateLostError):
        await admit(redis, run_keys, "00000000")
    assert await redis.exists(run_keys.prompts) == 0


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
