"""Chapter 1: a stream. How a prompt group gets from one service to the next.

Services exchange groups through three Redis streams: prompts, completions and scored. An entry of a stream belongs to
the consumer that read it, as long as that consumer renews its lease. A consumer that is done hands the group off: it
publishes the result to the next stream and removes the entry, in one step. If a consumer dies, another one takes its
entries over. An entry that cannot be processed is moved to the dead letters, with the reason.

The code is in shared/redis/streams.py. The fixtures ``redis`` and ``run_keys`` are in tests/conftest.py: a real Redis
server, and the keys of a run in it. The next chapter is test_a_groups_life.py, followed by test_a_reward.py,
test_a_push.py and test_accounting.py.
"""

import contextlib

import pytest

from shared.errors import MessageError, StateLostError
from shared.messages import decode_prompt_group
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.lease import alive, lease
from shared.redis.redis_connection import Redis, call
from shared.redis.streams import bury_malformed
from tests.groups import prompt_group
from tests.shared.redis.prompts_stream import admit, generator
from tests.stream_view import entries

pytestmark = pytest.mark.unit


async def test_a_group_is_admitted_once_however_often_the_dataset_is_read(redis: Redis, run_keys: RunKeys) -> None:
    assert await admit(redis, run_keys, "00000007")
    assert not await admit(redis, run_keys, "00000007")
    assert await redis.xlen(run_keys.prompts) == 1


async def test_a_hand_off_publishes_downstream_and_leaves_nothing_upstream(redis: Redis, run_keys: RunKeys) -> None:
    await admit(redis, run_keys, "00000000")
    (delivery,) = await generator(redis, run_keys).read(count=8, block_s=0.1)
    assert decode_prompt_group(delivery.payload) == prompt_group("00000000")

    assert await delivery.hand_off(run_keys.completions, run_keys.seen(run_keys.completions), b"completed")

    assert await redis.xlen(run_keys.prompts) == 0
    assert await redis.xlen(run_keys.completions) == 1


async def test_work_of_a_consumer_with_a_lease_is_never_reclaimed(redis: Redis, run_keys: RunKeys) -> None:
    await admit(redis, run_keys, "00000000")
    async with lease(redis, leases=run_keys.leases(GENERATORS), consumer="slow", lease_s=60):
        (delivery,) = await generator(redis, run_keys, "slow").read(count=1, block_s=0.1)
        assert await generator(redis, run_keys, "fast").read(count=1, block_s=0.05) == []
        assert await alive(redis, leases=run_keys.leases(GENERATORS)) == {"slow"}
    assert await alive(redis, leases=run_keys.leases(GENERATORS)) == set(), "the lease ends with the block"
    (again,) = await generator(redis, run_keys, "fast").read(count=1, block_s=0.1)
    assert again.entry_id == delivery.entry_id


async def test_the_second_result_of_a_group_is_dropped(redis: Redis, run_keys: RunKeys) -> None:
    await admit(redis, run_keys, "00000000")
    (slow,) = await generator(redis, run_keys, "slow").read(count=1, block_s=0.1)
    (fast,) = await generator(redis, run_keys, "fast").read(count=1, block_s=0.1)
    assert fast.entry_id == slow.entry_id, "the slow consumer has no lease, so it counts as dead"

    assert await fast.hand_off(run_keys.completions, run_keys.seen(run_keys.completions), b"first")
    assert not await slow.hand_off(run_keys.completions, run_keys.seen(run_keys.completions), b"second")

    assert [fields["payload"] for _, fields in await entries(redis, run_keys.completions)] == [b"first"]


async def test_a_restarted_consumer_first_gets_its_unfinished_entries(redis: Redis, run_keys: RunKeys) -> None:
    for number in range(3):
        await admit(redis, run_keys, f"{number:08d}")
    before = await generator(redis, run_keys).read(count=2, block_s=0.1)
    restarted = generator(redis, run_keys)
    after = [*await restarted.read(count=8, block_s=0.1), *await restarted.read(count=8, block_s=0.1)]
    assert [d.group_id for d in after] == [*(d.group_id for d in before), "00000002"]


async def test_an_unfinished_delivery_stays_pending(redis: Redis, run_keys: RunKeys) -> None:
    await admit(redis, run_keys, "00000000")
    (delivery,) = await generator(redis, run_keys).read(count=1, block_s=0.1)
    with contextlib.suppress(RuntimeError):
        async with bury_malformed(delivery):
            raise RuntimeError("the engine died")
    assert (await redis.xpending(run_keys.prompts, GENERATORS))["pending"] == 1
    assert await redis.xlen(run_keys.dead) == 0


async def test_an_entry_that_kills_its_consumer_is_buried_on_the_fourth_delivery(
    redis: Redis, run_keys: RunKeys
) -> None:
    await admit(redis, run_keys, "00000000")
    for _ in range(3):  # it reads the entry and dies
        (delivery,) = await generator(redis, run_keys).read(count=1, block_s=0.05)
        assert delivery.group_id == "00000000"
    assert await generator(redis, run_keys).read(count=1, block_s=0.05) == []

    ((_, letter),) = await entries(redis, run_keys.dead)
    assert letter["group_id"] == b"00000000"
    assert letter["reason"] == b"it was delivered 3 times; its consumers died or restarted without a result"
    assert await redis.xlen(run_keys.prompts) == 0


async def test_a_malformed_entry_is_buried_with_a_reason_and_can_be_replayed(redis: Redis, run_keys: RunKeys) -> None:
    await admit(redis, run_keys, "00000000")
    (delivery,) = await generator(redis, run_keys).read(count=1, block_s=0.1)
    async with bury_malformed(delivery):
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


async def test_a_wiped_redis_is_reported_as_lost_state_and_not_recreated(redis: Redis, run_keys: RunKeys) -> None:
    await redis.delete(*run_keys.everything())
    with pytest.raises(StateLostError, match="wiped"):
        await generator(redis, run_keys).read(count=1, block_s=0.1)
    with pytest.raises(StateLostError):
        await admit(redis, run_keys, "00000000")
    assert await redis.exists(run_keys.prompts) == 0
