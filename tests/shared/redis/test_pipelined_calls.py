"""Many hand-offs at the same moment: few round trips, few connections, and each gets its own result."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from redis.exceptions import NoPermissionError, OutOfMemoryError

from shared.errors import StateLostError, UnavailableError
from shared.redis.keys import REWARDERS, RunKeys
from shared.redis.pipelined_calls import PipelinedCalls
from shared.redis.redis_connection import Redis
from shared.redis.streams import StreamConsumer

pytestmark = pytest.mark.unit


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


async def test_callers_may_be_cancelled_at_any_moment_and_the_others_still_get_theirs(
    redis: Redis, run_keys: RunKeys
) -> None:
    calls = PipelinedCalls(redis)

    async def renew(name: str) -> Any:
        return await calls.call("headrace_renew", keys=(run_keys.leases("test"),), args=(name, 60_000))

    tasks = [asyncio.create_task(renew(f"consumer-{number}")) for number in range(50)]
    for turn in range(20):  # before theirs is sent, meanwhile, and after
        await asyncio.sleep(0)
        tasks[turn].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[20:] == [1] * 30
    assert all(result == 1 or isinstance(result, asyncio.CancelledError) for result in results[:20])
    names: Any = await redis.zrange(run_keys.leases("test"), 0, -1)
    assert {f"consumer-{number}".encode() for number in range(20, 50)} <= set(names)
    with pytest.raises(StateLostError):
        await calls.call("headrace_no_such_function", keys=("{run}:key",))


class PlayedRedis:
    """A client that records the calls and argument bytes of each round trip, and may never answer."""

    def __init__(self, *, answers: bool = True) -> None:
        self.round_trips: list[tuple[int, int]] = []
        self.answers = answers
        self._calls: list[int] = []

    def pipeline(self, *, transaction: bool) -> "PlayedRedis":
        assert not transaction
        self._calls = []
        return self

    def fcall(self, _function: str, num_keys: int, *keys_and_args: bytes) -> None:
        self._calls.append(sum(map(len, keys_and_args[num_keys:])))

    async def execute(self, *, raise_on_error: bool) -> Sequence[int]:
        assert not raise_on_error
        if not self.answers:
            await asyncio.Event().wait()
        self.round_trips.append((len(self._calls), sum(self._calls)))
        await asyncio.sleep(0)
        return [1] * len(self._calls)


async def test_a_round_trip_is_bounded_in_calls_and_bytes_and_takes_one_call_at_least() -> None:
    redis = PlayedRedis()
    calls = PipelinedCalls(cast("Redis", redis))
    sizes = [0] * 300 + [3 << 20] * 4 + [20 << 20, 1]
    await asyncio.gather(*(calls.call("f", keys=(), args=(bytes(size),)) for size in sizes))
    mib = 1 << 20
    assert redis.round_trips == [
        (128, 0), (128, 0), (46, 6 * mib), (2, 6 * mib), (1, 20 * mib), (1, 1)
    ]  # fmt: skip


async def test_when_all_callers_are_gone_nothing_goes_on_and_later_calls_are_sent() -> None:
    redis = PlayedRedis(answers=False)
    calls = PipelinedCalls(cast("Redis", redis))
    others = asyncio.all_tasks()
    callers = [asyncio.create_task(calls.call("f", keys=())) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert len(asyncio.all_tasks() - others) == 4, "three callers, and the task that sends"
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    redis.answers = True
    assert await calls.call("f", keys=()) == 1
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == others


async def test_a_failed_round_trip_fails_its_first_call_and_the_others_are_sent_again() -> None:
    class Refusing(PlayedRedis):
        async def execute(self, *, raise_on_error: bool) -> Sequence[int]:
            if not self.round_trips:
                self.round_trips.append((0, 0))
                raise NoPermissionError("this user may not")
            return await super().execute(raise_on_error=raise_on_error)

    redis = Refusing()
    calls = PipelinedCalls(cast("Redis", redis))
    ended = await asyncio.gather(*(calls.call("f", keys=()) for _ in range(3)), return_exceptions=True)
    assert str(ended[0]) == "Redis refused: this user may not"
    assert ended[1:] == [1, 1]
    assert redis.round_trips == [(0, 0), (2, 0)]


async def test_a_round_trip_that_never_ends_does_not_delay_later_callers() -> None:
    class HangingOnce(PlayedRedis):
        async def execute(self, *, raise_on_error: bool) -> Sequence[int]:
            if not self.round_trips:
                self.round_trips.append((0, 0))
                await asyncio.Event().wait()
            return await super().execute(raise_on_error=raise_on_error)

    calls = PipelinedCalls(cast("Redis", HangingOnce()))
    callers: list[asyncio.Task[Any]] = []
    for _ in range(10):  # so that there is always a waiting caller
        callers.append(asyncio.create_task(calls.call("f", keys=(), timeout_s=1.2)))
        await asyncio.sleep(0.3)
    ended = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(ended[0], UnavailableError)
    assert ended[5:] == [1] * 5


async def test_the_timeouts_of_all_waiting_callers_start_again_when_redis_is_full() -> None:
    class FullAtFirst(PlayedRedis):
        async def execute(self, *, raise_on_error: bool) -> Sequence[Any]:
            answers = await super().execute(raise_on_error=raise_on_error)
            return answers if len(self.round_trips) > 3 else [OutOfMemoryError("OOM")] * len(answers)

    redis = FullAtFirst()
    calls = PipelinedCalls(cast("Redis", redis))
    assert await asyncio.gather(*(calls.call("f", keys=(), timeout_s=0.2) for _ in range(200))) == [1] * 200
    assert redis.round_trips == [(128, 0)] * 4 + [(72, 0)], "after 0.05, 0.1 and 0.2 s"


async def test_if_the_sending_task_is_cancelled_its_callers_fail_at_once() -> None:
    calls = PipelinedCalls(cast("Redis", PlayedRedis(answers=False)))
    callers = [asyncio.create_task(calls.call("f", keys=())) for _ in range(3)]
    await asyncio.sleep(0.01)
    for task in asyncio.all_tasks() - {asyncio.current_task(), *callers}:
        task.cancel()
    ended = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 120)
    assert [str(error) for error in ended] == ["Redis function f was cancelled"] * 3


async def test_calls_ahead_in_the_queue_do_not_extend_a_timeout() -> None:
    calls = PipelinedCalls(cast("Redis", PlayedRedis(answers=False)))
    async with asyncio.timeout(120):
        ended = await asyncio.gather(
            *(calls.call("f", keys=(), timeout_s=0.1) for _ in range(500)), return_exceptions=True
        )
    assert {str(error) for error in ended} == {"Redis function f was not answered within 0.1 s"}
    assert all(isinstance(error, UnavailableError) for error in ended)
