"""Recordings in a real Redis: who may write them, and when they are gone."""

from collections.abc import Awaitable, Callable

import msgspec
import pytest

from services.sessions.recording.recorded import Entry, RecordedTurn, RolloutEnd, ToolResults
from services.sessions.recording.recording import Recording
from services.sessions.session_store import GroupStore, GroupTakenError, SessionFullError
from services.trainer.groups.ledger import Ledger
from services.trainer.intake.reconcile import withdraw_unsampled
from shared.errors import MessageError, StateLostError
from shared.messages import MAX_MESSAGE_BYTES, RETURNED_LIST, PlayedEnvironment, VersionSpan, encode
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.redis.streams import Delivery, StreamConsumer
from tests.groups import prompt_group
from tests.sessions.scripted import assistant, sampled, tool, user

Claim = Callable[[str], Awaitable[Delivery]]


def turn(number: int = 0, *, version: int = 3, text: str = "4") -> RecordedTurn:
    sampled_turn = sampled(assistant(text), spans=(VersionSpan(version, 0, 2, 1),))
    return RecordedTurn(b"%d" % number, None, [user("2+2?")], b"", False, 0, sampled_turn)


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
            keys_of=lambda group_id: (run_keys.sessions(group_id),),
        )
        (delivery,) = await consumer.read(count=1, block_s=None)
        return delivery

    return claim


async def test_another_replica_loads_the_recordings_in_order(claim: Claim, run_keys: RunKeys) -> None:
    first = GroupStore(await claim("a"), run_keys, num_rollouts=3)
    results = ToolResults(0, [tool("4")], 0)
    entries: list[Entry] = [turn(0), results, *(turn(number) for number in range(2, 12))]
    for number, entry in enumerate(entries):
        await first.record(1, number, entry)
    await first.record(0, 0, turn(0))
    second = GroupStore(await claim("b"), run_keys, num_rollouts=3)
    assert await second.load() == {0: [turn(0)], 1: entries}


async def test_a_replica_that_was_taken_for_dead_cannot_add_to_a_session(
    claim: Claim, redis: Redis, run_keys: RunKeys
) -> None:
    first = GroupStore(await claim("a"), run_keys, num_rollouts=3)
    await first.record(0, 0, turn(0))
    second = GroupStore(await claim("b"), run_keys, num_rollouts=3)
    with pytest.raises(GroupTakenError, match="no longer belongs"):
        await first.record(0, 1, turn(1))
    await second.record(0, 1, turn(1, text="other"))
    assert await second.load() == {0: [turn(0), turn(1, text="other")]}


async def test_an_entry_is_written_once(claim: Claim, run_keys: RunKeys) -> None:
    store = GroupStore(await claim("a"), run_keys, num_rollouts=3)
    await store.record(0, 0, turn(0))
    await store.record(0, 0, turn(0))  # again after a lost reply
    with pytest.raises(GroupTakenError):
        await store.record(0, 0, turn(0, text="other"))
    assert await store.load() == {0: [turn(0)]}


async def test_what_the_message_of_a_group_has_once_takes_room_once(claim: Claim, run_keys: RunKeys) -> None:
    """Twenty rollouts with a prompt of 1 MiB, and with a conversation of 1 MiB that is recorded at its end again."""
    store, long = GroupStore(await claim("a"), run_keys, num_rollouts=3), "x" * 2**20
    first = msgspec.structs.replace(turn(0), messages=[user(long)])
    end = RolloutEnd([assistant(long)], 0, 0, PlayedEnvironment("games:Game", False))
    for branch in range(20):
        await store.record(branch, 0, first)
        await store.record(branch, 1, end)
    second = GroupStore(await claim("b"), run_keys, num_rollouts=3)
    assert await second.load() == {branch: [first, end] for branch in range(20)}
    await second.record(0, 2, turn(2))


async def test_examples_in_the_first_request_of_an_agent_count_for_each_of_its_rollouts(
    claim: Claim, run_keys: RunKeys
) -> None:
    store, long = GroupStore(await claim("a"), run_keys, num_rollouts=3), "x" * 2**20
    first = msgspec.structs.replace(turn(0), messages=[user("an example"), assistant(long), user("2+2?")])
    for branch in range(14):
        await store.record(branch, 0, first)
    with pytest.raises(SessionFullError):
        await store.record(14, 0, first)


async def test_the_recordings_are_gone_once_the_group_is_handed_off(
    claim: Claim, redis: Redis, run_keys: RunKeys
) -> None:
    delivery = await claim("a")
    store = GroupStore(delivery, run_keys, num_rollouts=3)
    await store.record(0, 0, turn(0))
    seen = run_keys.seen(run_keys.completions)
    assert await delivery.hand_off(run_keys.completions, seen, b"group")
    assert not await redis.exists(store.key)
    with pytest.raises(GroupTakenError):
        await store.record(0, 1, turn(1))
    assert not await redis.exists(store.key)


async def test_the_recordings_are_gone_once_the_group_is_withdrawn(
    claim: Claim, redis: Redis, run_keys: RunKeys
) -> None:
    store = GroupStore(await claim("a"), run_keys, num_rollouts=3)
    await store.record(0, 0, turn(0))
    await redis.sadd(run_keys.seen(run_keys.prompts), "00000000")
    assert await withdraw_unsampled(redis, run_keys, Ledger(), incarnation=1) == 1
    assert not await redis.exists(store.key)


async def test_the_recordings_are_gone_with_their_run(claim: Claim, redis: Redis, run_keys: RunKeys) -> None:
    store = GroupStore(await claim("a"), run_keys, num_rollouts=3)
    await redis.hset(run_keys.started, "00000000", "1:3")  # as a claim does
    await store.record(0, 0, turn(0))
    await RunStore(redis).delete(run_keys.run_id)
    assert await redis.keys(f"headrace:{{{run_keys.run_id}}}:*") == []
    with pytest.raises(StateLostError):
        await store.record(0, 1, turn(1))


async def test_the_start_of_a_group_is_its_oldest_token_once_every_rollout_has_a_turn(
    claim: Claim, redis: Redis, run_keys: RunKeys
) -> None:
    async def start() -> object:
        return await redis.hget(run_keys.started, "00000000")

    await redis.hset(run_keys.started, "00000000", "1:4")  # when it was claimed
    store = GroupStore(await claim("a"), run_keys, num_rollouts=3)
    await store.record(0, 0, turn(0, version=7))
    await store.record(1, 0, turn(0, version=6))
    assert await start() == b"1:4", "the third one may have begun with version 4"
    await store.record(2, 0, turn(0, version=8))
    assert await start() == b"1:6"
    await store.record(2, 1, turn(1, version=5))  # its client asked for two turns at a time, and this one took longer
    assert await start() == b"1:5"

    await redis.hset(run_keys.started, "00000000", "1:6")  # as if the replica had died before it wrote this
    again = GroupStore(await claim("b"), run_keys, num_rollouts=3)
    await again.load()
    assert await start() == b"1:5"
    await again.record(0, 1, turn(1, version=9))
    assert await start() == b"1:5"


async def test_a_group_has_the_room_of_the_largest_message_and_another_replica_knows_what_is_left(
    claim: Claim, run_keys: RunKeys
) -> None:
    store = GroupStore(await claim("a"), run_keys, num_rollouts=3)
    third = "x" * (MAX_MESSAGE_BYTES // 3)
    await store.record(0, 0, turn(0, text=third))
    await store.record(1, 0, turn(0, text=third))
    with pytest.raises(SessionFullError, match="the conversations of its group take"):
        await store.record(0, 1, turn(1, text=third))
    await store.record(0, 1, turn(1))
    again = GroupStore(await claim("b"), run_keys, num_rollouts=3)
    await again.load()
    with pytest.raises(SessionFullError):
        await again.record(1, 1, turn(1, text=third))


async def test_results_take_room_with_the_turn_that_follows_them_or_if_they_are_the_last(
    claim: Claim, run_keys: RunKeys
) -> None:
    store = GroupStore(await claim("a"), run_keys, num_rollouts=3)
    third = [tool("x" * (MAX_MESSAGE_BYTES // 3))]
    for branch in range(5):  # of which none may have room for another turn, and then they are dropped
        await store.record(branch, 0, turn(0))
        await store.record(branch, 1, ToolResults(0, third, 0))
    again = GroupStore(await claim("b"), run_keys, num_rollouts=3)
    await again.load()
    followed = msgspec.structs.replace(turn(2), continues=0, messages=third)
    await again.record(0, 2, followed)
    await again.record(5, 0, turn(0))
    await again.record(5, 1, ToolResults(0, third, 0, is_last=True))
    with pytest.raises(SessionFullError):
        await again.record(1, 2, followed)


async def test_lists_for_reward_functions_take_room_beside_the_text_of_the_turn_that_follows(
    claim: Claim, run_keys: RunKeys
) -> None:
    store = GroupStore(await claim("a"), run_keys, num_rollouts=3)
    third = [tool("4") | {RETURNED_LIST: ["x" * (MAX_MESSAGE_BYTES // 3)]}]
    for branch in range(3):
        await store.record(branch, 0, turn(0))
    for branch in range(2):
        await store.record(branch, 1, ToolResults(0, third, 0))
    with pytest.raises(SessionFullError):
        await store.record(2, 1, ToolResults(0, third, 0))


async def test_results_that_are_larger_than_a_whole_group_are_not_recorded(claim: Claim, run_keys: RunKeys) -> None:
    store = GroupStore(await claim("a"), run_keys, num_rollouts=3)
    await store.record(0, 0, turn(0))
    with pytest.raises(SessionFullError):
        await store.record(0, 1, ToolResults(0, [tool("x" * MAX_MESSAGE_BYTES)], 0))


async def test_what_forks_repeat_in_their_rows_takes_room(claim: Claim, run_keys: RunKeys) -> None:
    """Each of 400 forks of a long prompt takes 300 bytes here, and 5 bytes for each token of the prompt in its row."""
    store = GroupStore(await claim("a"), run_keys, num_rollouts=3)
    first = sampled(assistant("4"), appended_ids=range(10_000))
    entries = [RecordedTurn(b"", None, [user("2+2?")], b"", False, 0, first)]
    entries += [
        RecordedTurn(b"%d" % number, 0, [], b"", False, 10_002, sampled(assistant("4"))) for number in range(400)
    ]
    num_recorded = 0
    with pytest.raises(SessionFullError):  # noqa: PT012
        for number, entry in enumerate(entries):
            await store.record(0, number, entry)
            num_recorded += 1
    group = msgspec.msgpack.encode(Recording(entries[:num_recorded]).rows())
    assert MAX_MESSAGE_BYTES * 0.85 < len(group) < MAX_MESSAGE_BYTES
    again = GroupStore(await claim("b"), run_keys, num_rollouts=3)
    await again.load()
    with pytest.raises(SessionFullError):
        await again.record(0, num_recorded, entries[num_recorded])


async def test_entries_behind_one_that_redis_has_lost_are_recorded_again(
    claim: Claim, redis: Redis, run_keys: RunKeys
) -> None:
    """A Redis that was killed loses the last writes, and a replica that outlives it records the next ones."""
    store = GroupStore(await claim("a"), run_keys, num_rollouts=3)
    for number in range(4):
        await store.record(1, number, turn(number))
    await store.record(0, 0, turn(0))
    for number in range(2):
        await store.record(2, number, turn(number))
    await redis.hdel(store.key, "1/1", "2/0")
    again = GroupStore(await claim("b"), run_keys, num_rollouts=3)
    assert await again.load() == {0: [turn(0)], 1: [turn(0)]}
    await again.record(1, 1, turn(7))
    await again.record(1, 2, turn(8))
    last = GroupStore(await claim("c"), run_keys, num_rollouts=3)
    assert await last.load() == {0: [turn(0)], 1: [turn(0), turn(7), turn(8)]}


async def test_a_late_hand_off_keeps_what_is_recorded_of_a_group_that_was_admitted_again(
    claim: Claim, redis: Redis, run_keys: RunKeys
) -> None:
    late = await claim("a")
    seen = run_keys.seen(run_keys.completions)
    assert await (await claim("b")).hand_off(run_keys.completions, seen, b"group")
    store = GroupStore(await claim("b"), run_keys, num_rollouts=3)  # a new entry with the same group
    await store.record(0, 0, turn(0))
    assert not await late.hand_off(run_keys.completions, seen, b"late")
    assert await store.load() == {0: [turn(0)]}


async def test_the_recordings_are_gone_once_the_group_is_buried(claim: Claim, redis: Redis, run_keys: RunKeys) -> None:
    delivery = await claim("a")
    store = GroupStore(delivery, run_keys, num_rollouts=3)
    await store.record(0, 0, turn(0))
    await delivery.bury("the model cannot take it")
    assert not await redis.exists(store.key)


async def test_an_entry_of_another_release_is_an_error(claim: Claim, redis: Redis, run_keys: RunKeys) -> None:
    store = GroupStore(await claim("a"), run_keys, num_rollouts=3)
    await redis.hset(store.key, "0/0", b"\x81\xa4type\xa5other")
    with pytest.raises(MessageError, match="another release"):
        await store.load()
