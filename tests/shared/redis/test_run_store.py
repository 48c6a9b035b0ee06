"""The records of runs in Redis."""

from typing import Any, cast

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis, call
from shared.redis.run_record import Status
from shared.redis.run_store import RunStore
from shared.redis.streams import StreamConsumer
from shared.run_options.run_config import RunConfig

pytestmark = pytest.mark.unit


async def test_a_run_whose_creation_was_cut_short_is_not_seen_and_can_be_created_again(
    redis: Redis, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunStore(redis)

    async def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(redis, "hset", die)
        with pytest.raises(KeyboardInterrupt):
            await store.create("run-cut", run_config, run_dir="/runs/run-cut")
    assert await store.queued() == []

    await store.create("run-cut", run_config, run_dir="/runs/run-cut")
    assert [record.run_id for record in await store.queued()] == ["run-cut"]


async def test_a_run_that_begins_before_its_creation_got_an_answer_is_not_queued_again(
    redis: Redis, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, write = RunStore(redis), redis.hset

    async def lose_the_answer(*arguments: Any, **options: Any) -> None:
        await cast("Any", write)(*arguments, **options)
        monkeypatch.setattr(redis, "hset", write)
        await RunStore(redis).set_status("run-begun", "running")
        raise RedisTimeoutError("Timeout reading from socket")

    monkeypatch.setattr(redis, "hset", lose_the_answer)
    record = await store.create("run-begun", run_config, run_dir="/runs/run-begun")
    assert record.status == "running"


@pytest.mark.parametrize(("status", "is_kept"), [("finished", False), ("stopped", False), ("failed", True)])
async def test_groups_of_a_run_that_can_never_go_on_leave_redis(
    status: Status, is_kept: bool, redis: Redis, run_config: RunConfig
) -> None:
    """Services that have not noticed the end do no harm, and what they add is deleted with the run."""
    store, keys = RunStore(redis), RunKeys("run-ended")
    await store.create("run-ended", run_config, run_dir="/runs/run-ended")
    for stream, _ in keys.consumer_groups():
        for group_id in ("00000000", "00000001"):
            await redis.xadd(stream, {"group_id": group_id, "payload": "x"})
            await cast("Any", redis.sadd(keys.seen(stream), group_id))
    async with redis.pipeline(transaction=False) as pipe:
        for number in range(12_000):
            pipe.xadd(keys.events, {"kind": "log", "data": str(number)})
        await pipe.execute()
    await cast("Any", redis.hset(keys.started, mapping={"00000000": "1:0", b"\xff": "garbage"}))
    await cast("Any", redis.hset(keys.sessions("00000000"), "0/0", "a turn"))
    consumer = StreamConsumer(
        redis,
        stream=keys.prompts,
        consumer_group=GENERATORS,
        name="generator-0",
        leases=keys.leases(GENERATORS),
        dead=keys.dead,
        keys_of=lambda group_id: (keys.sessions(group_id),),
    )
    first, second = await consumer.read(count=2)

    await store.set_status("run-ended", status)
    left = 2 if is_kept else 0
    assert [await redis.xlen(stream) for stream, _ in keys.consumer_groups()] == [left] * 3
    assert [await cast("Any", redis.scard(keys.seen(stream))) for stream, _ in keys.consumer_groups()] == [left] * 3
    assert await redis.exists(keys.sessions("00000000")) == int(is_kept)
    num_events = await redis.xlen(keys.events)
    assert num_events == (12_000 if is_kept else 1000)

    late = (GENERATORS, "generator-0", first.entry_id, "0/1", "late")
    assert await call(redis, "headrace_record", keys=(keys.prompts, keys.sessions("00000000")), args=late) == 1
    await second.hand_off(keys.completions, keys.seen(keys.completions), b"late")
    await consumer.give_back()
    await store.delete("run-ended")
    assert await cast("Any", redis).keys("headrace:{run-ended}:*") == []
