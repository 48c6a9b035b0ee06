"""Many hand-offs at the same moment: few round trips, few connections, and each of them as if it were alone."""

import asyncio
from typing import Any

import pytest

from shared.errors import StateLostError
from shared.keys import REWARDERS, RunKeys
from shared.pipelined_calls import PipelinedCalls
from shared.redis_connection import Redis
from shared.streams import StreamConsumer


def consumer_of(redis: Redis, keys: RunKeys) -> StreamConsumer:
    return StreamConsumer(
        redis,
        stream=keys.completions,
        consumer_group=REWARDERS,
        name="rewarder-0",
        leases=keys.leases(REWARDERS),
        dead=keys.dead,
    )


async def calls_and_connections(redis: Redis) -> tuple[int, int]:
    stats: Any = await redis.info("stats")
    return int(stats["total_reads_processed"]), int(stats["total_connections_received"])


async def test_five_hundred_results_at_once_take_few_round_trips_on_few_connections(
    redis: Redis, run_keys: RunKeys
) -> None:
    for number in range(500):
        await redis.xadd(run_keys.completions, {"group_id": f"{number}", "payload": b"completed"})
    deliveries = await consumer_of(redis, run_keys).read(count=500)
    reads_before, connections_before = await calls_and_connections(redis)
    are_first = await asyncio.gather(
        *(
            delivery.hand_off(run_keys.scored, run_keys.seen(run_keys.scored), f"scored {delivery.group_id}".encode())
            for delivery in deliveries
        )
    )
    reads, connections = await calls_and_connections(redis)
    assert are_first == [True] * 500
    assert reads - reads_before < 100
    assert connections - connections_before <= 2
    scored: Any = await redis.xrange(run_keys.scored)
    assert [fields[b"payload"] for _, fields in scored] == [f"scored {number}".encode() for number in range(500)]
    assert await redis.xlen(run_keys.completions) == 0


async def test_each_gets_the_answer_to_its_own_call(redis: Redis, run_keys: RunKeys) -> None:
    calls = PipelinedCalls(redis)
    lost = RunKeys("no-such-run")

    async def hand_off(keys: RunKeys, group_id: str) -> Any:
        return await calls.call(
            "headrace_hand_off",
            keys=(keys.completions, keys.scored, keys.seen(keys.scored)),
            args=(REWARDERS, "1-1", group_id, b"payload"),
        )

    answers: tuple[Any, ...] = await asyncio.gather(
        hand_off(run_keys, "1"),
        hand_off(run_keys, "1"),
        hand_off(lost, "1"),
        hand_off(run_keys, "2"),
        return_exceptions=True,
    )
    first, again, failed, other = answers
    assert (first, again, other) == (1, 0, 1)
    assert isinstance(failed, StateLostError)


async def test_who_sends_for_all_may_be_cancelled_and_the_others_still_get_theirs(
    redis: Redis, run_keys: RunKeys
) -> None:
    calls = PipelinedCalls(redis)

    async def renew(name: str) -> Any:
        return await calls.call("headrace_renew", keys=(run_keys.leases("test"),), args=(name, 60_000))

    tasks = [asyncio.create_task(renew(f"consumer-{number}")) for number in range(50)]
    for turn in range(20):  # whoever sends at that moment
        await asyncio.sleep(0)
        tasks[turn].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[20:] == [1] * 30
    assert all(result == 1 or isinstance(result, asyncio.CancelledError) for result in results[:20])
    names: Any = await redis.zrange(run_keys.leases("test"), 0, -1)
    assert {f"consumer-{number}".encode() for number in range(20, 50)} <= set(names)
    with pytest.raises(StateLostError):
        await calls.call("headrace_no_such_function", keys=("{run}:key",))
