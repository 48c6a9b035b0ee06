"""Recordings in a real Redis: who may write them, and when they are gone."""

from collections.abc import Awaitable, Callable

import pytest

from services.sessions.recording.recorded import Entry, RecordedTurn, ToolResults
from services.sessions.session_store import GroupStore, GroupTakenError, SessionFullError
from services.trainer.groups.ledger import Ledger
from services.trainer.intake.reconcile import withdraw_unsampled
from shared.errors import MessageError, StateLostError
from shared.messages import MAX_MESSAGE_BYTES, VersionSpan, encode
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.redis.streams import Delivery, StreamConsumer
from tests.groups import prompt_group
from tests.sessions.scripted import assistant, sampled, tool, user

Claim = Callable[[str], Awaitable[Delivery]]


def turn(number: int = 0, *, version: int = 3, text: str = "4") -> RecordedTurn:
    sampled_turn = sampled(assistant(text), spans=(VersionSpan(version, 0, 2, 1),))
    return RecordedTurn(b"%d" % number, None, [user("2+2?")], b"", False, sampled_turn)


@pytest.fixture
def claim(redis: Redis, run_keys: RunKeys) -> Claim:
    """Return a function with which a replica claims the only group, also from a dead replica."""

    async def claim(replica_id: str) -> Delivery:
        if not await redis.xlen(run_keys.prompts):
            payload = encode(prompt_group("00000000"))
            await redis.xadd(run_keys.prompts, {"group_id": "00000000", "payload": payload})
        consumer = StreamConsumer(
            redis,
            stream=run_keys.prompts,
            consumer_group=GENERATORS,
            name=replica_id,
            leases=run_keys.leases(GENERATORS),
            dead=run_keys.dead,
        )
        (delivery,) = await consumer.read(count=1, block_s=None)
        return delivery

    return claim


async def test_another_replica_loads_the_recordings_in_order(claim: Claim, run_keys: RunKeys) -> None:
    first = GroupStore(await claim("a"), run_keys, num_rollouts=2)
    results = ToolResults(0, [tool("4")], 0)
    entries: list[Entry] = [turn(0), results, *(turn(number) for number in range(2, 12))]
    for number, entry in enumerate(entries):
        await first.record(1, number, entry)
    await first.record(0, 0, turn(0))
    second = GroupStore(await claim("b"), run_keys, num_rollouts=2)
    assert await second.load() == {0: [turn(0)], 1: entries}


async def test_a_replica_that_was_taken_for_dead_cannot_add_to_a_session(
    claim: Claim, redis: Redis, run_keys: RunKeys
) -> None:
    first = GroupStore(await claim("a"), run_keys, num_rollouts=2)
    await first.record(0, 0, turn(0))
    second = GroupStore(await claim("b"), run_keys, num_rollouts=2)
    with pytest.raises(GroupTakenError, match="no longer belongs"):
        await first.record(0, 1, turn(1))
    await second.record(0, 1, turn(1, text="other"))
    assert await second.load() == {0: [turn(0), turn(1, text="other")]}


async def test_an_entry_is_written_once(claim: Claim, run_keys: RunKeys) -> None:
    store = GroupStore(await claim("a"), run_keys, num_rollouts=2)
    await store.record(0, 0, turn(0))
    await store.record(0, 0, turn(0))  # again after a lost reply
    with pytest.raises(GroupTakenError):
        await store.record(0, 0, turn(0, text="other"))
    assert await store.load() == {0: [turn(0)]}


async def test_the_recordings_are_gone_once_the_group_is_handed_off(
    claim: Claim, redis: Redis, run_keys: RunKeys
) -> None:
    delivery = await claim("a")
    store = GroupStore(delivery, run_keys, num_rollouts=2)
    await store.record(0, 0, turn(0))
    seen = run_keys.seen(run_keys.completions)
    assert await delivery.hand_off(run_keys.completions, seen, b"group", forgets=(store.key,))
    assert not await redis.exists(store.key)
    with pytest.raises(GroupTakenError):
        await store.record(0, 1, turn(1))
    assert not await redis.exists(store.key)


async def test_the_recordings_are_gone_once_the_group_is_withdrawn(
    claim: Claim, redis: Redis, run_keys: RunKeys
) -> None:
    store = GroupStore(await claim("a"), run_keys, num_rollouts=2)
    await store.record(0, 0, turn(0))
    await redis.sadd(run_keys.seen(run_keys.prompts), "00000000")
    assert await withdraw_unsampled(redis, run_keys, Ledger(), incarnation=1) == 1
    assert not await redis.exists(store.key)


async def test_the_recordings_are_gone_with_their_run(claim: Claim, redis: Redis, run_keys: RunKeys) -> None:
    store = GroupStore(await claim("a"), run_keys, num_rollouts=2)
    await store.record(0, 0, turn(0))
    await RunStore(redis).delete(run_keys.run_id)
    assert await redis.keys(f"headrace:{{{run_keys.run_id}}}:*") == []
    with pytest.raises(StateLostError):
        await store.record(0, 1, turn(1))


async def test_the_start_of_a_group_is_its_oldest_first_turn(claim: Claim, redis: Redis, run_keys: RunKeys) -> None:
    async def start() -> object:
        return await redis.hget(run_keys.started, "00000000")

    store = GroupStore(await claim("a"), run_keys, num_rollouts=2)
    await store.record(0, 0, turn(0, version=5))
    assert await start() == b"1:5"
    await store.record(0, 1, turn(1, version=2))  # cannot be: versions rise; but it is not the group's start either
    await store.record(1, 0, turn(0, version=4))
    assert await start() == b"1:4"
    again = GroupStore(await claim("b"), run_keys, num_rollouts=3)
    await again.load()
    await again.record(2, 0, turn(0, version=6))
    assert await start() == b"1:4"


async def test_a_session_has_its_share_of_the_largest_message(claim: Claim, run_keys: RunKeys) -> None:
    store = GroupStore(await claim("a"), run_keys, num_rollouts=1024)
    half = "x" * (MAX_MESSAGE_BYTES // 1024 // 2)
    await store.record(0, 0, turn(0, text=half))
    await store.record(1, 0, turn(0, text=half))
    with pytest.raises(SessionFullError, match="16384"):
        await store.record(0, 1, turn(1, text=half))
    again = GroupStore(await claim("b"), run_keys, num_rollouts=1024)
    await again.load()
    with pytest.raises(SessionFullError):
        await again.record(1, 1, turn(1, text=half))


async def test_an_entry_of_another_release_is_an_error(claim: Claim, redis: Redis, run_keys: RunKeys) -> None:
    store = GroupStore(await claim("a"), run_keys, num_rollouts=2)
    await redis.hset(store.key, "0/0", b"\x81\xa4type\xa5other")
    with pytest.raises(MessageError, match="another release"):
        await store.load()
