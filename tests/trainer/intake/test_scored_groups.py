"""The scored stream at the trainer: invalid entries are buried, and the others are considered in the stream's order.

So a resumed trainer chooses the same groups as the one before.
"""

import msgspec
import pytest

from services.trainer.fence import take_over
from services.trainer.groups.group_ids import evaluation_id, group_id
from services.trainer.groups.ledger import Ledger
from services.trainer.intake.scored_groups import ScoredGroups, require_trainable
from shared.errors import MessageError
from shared.messages import Row, encode
from shared.redis.keys import TRAINERS, RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.streams import StreamConsumer
from shared.run_options.run_config import RunConfig
from tests.groups import row, scored_group
from tests.stream_view import entries
from tests.trainer.bookkeeping import Trainer, generate, score

pytestmark = pytest.mark.unit

ORDER = [number ^ 1 for number in range(150)]
"""1 0 3 2 5 4 ...: groups overtake each other on their way."""


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (row((5, 6, 7, 64), (0, 0, 0, 1)), "rollout 00000000-0 has token id 64, outside the model's vocabulary of 64"),
        (row((5, 6, 7, 8), (0, 0, 0, 1), 7), "rollout 00000000-0 was sampled by policy version 7 of a run of 6 steps"),
    ],
)
def test_every_row_of_a_group_must_be_trainable(second: Row, reason: str) -> None:
    group = scored_group(policy_version=6)
    require_trainable(group, vocab_size=64, total_steps=6)
    forked = msgspec.structs.replace(group.rollouts[0], rows=(*group.rollouts[0].rows, second))
    with pytest.raises(MessageError, match=reason):
        require_trainable(
            msgspec.structs.replace(group, rollouts=(forked, group.rollouts[1])), vocab_size=64, total_steps=6
        )


def scored_consumer(redis: Redis, keys: RunKeys, name: str) -> StreamConsumer:
    return StreamConsumer(
        redis,
        stream=keys.scored,
        consumer_group=TRAINERS,
        name=name,
        leases=keys.leases(TRAINERS),
        dead=keys.dead,
        reclaim_every_s=1.0,
        max_deliveries=None,
    )


async def publish(redis: Redis, keys: RunKeys) -> list[str]:
    """Put scored groups on the stream in ORDER; return their stream ids."""
    for number in ORDER:
        payload = encode(scored_group(group_id(number)))
        await redis.xadd(keys.scored, {"group_id": group_id(number), "payload": payload})
    return [entry_id for entry_id, _ in await entries(redis, keys.scored)]


def scored_groups(redis: Redis, keys: RunKeys, *, incarnation: int, ledger: Ledger | None = None) -> ScoredGroups:
    seat = scored_consumer(redis, keys, f"trainer-{incarnation}")
    return ScoredGroups(redis, keys=keys, ledger=ledger or Ledger(admitted=150), incarnation=incarnation, consumer=seat)


async def test_groups_that_several_dead_trainers_have_read_are_considered_in_the_order_of_the_stream(
    redis: Redis, run_keys: RunKeys
) -> None:
    """Trainer 2 read the older entries, trainer 10 the newer ones. Redis lists trainer 10 first. Others are unread."""
    ids = await publish(redis, run_keys)
    assert len(await scored_consumer(redis, run_keys, "trainer-2").read(count=70)) == 70
    assert len(await scored_consumer(redis, run_keys, "trainer-10").read(count=60)) == 60
    incarnation = await take_over(redis, run_keys)
    scored = scored_groups(redis, run_keys, incarnation=incarnation)

    considered = await scored.recover(considered_to=ids[29])

    assert [waiting.number for waiting in considered] == ORDER[:30], "as far as the checkpoint had considered"
    assert scored.considered_to == ids[29]
    rest = [scored.consider() for _ in range(120)]
    assert [waiting.number for waiting in rest if waiting is not None] == ORDER[30:]
    assert scored.considered_to == ids[-1]
    assert scored.consider() is None


async def test_a_group_that_arrived_may_be_chosen_only_after_it_was_considered(redis: Redis, run_keys: RunKeys) -> None:
    await publish(redis, run_keys)
    scored = scored_groups(redis, run_keys, incarnation=1)
    await scored.receive(block_s=0.1)
    assert len(scored.numbers()) == 64, "as many as are read at a time"
    assert scored.oldest_first() == []
    scored.consider()
    scored.consider()
    assert [waiting.number for waiting in scored.oldest_first()] == [0, 1], (
        "equally old, so the group admitted first comes first"
    )
    assert scored.considered() == {0, 1}


async def test_settled_groups_are_not_considered_again(redis: Redis, run_keys: RunKeys) -> None:
    ids = await publish(redis, run_keys)
    ledger = Ledger(admitted=150)
    for number in range(10):
        ledger.record_trained(number)
    scored = scored_groups(redis, run_keys, incarnation=1, ledger=ledger)
    considered = await scored.recover(considered_to=ids[11])
    assert [waiting.number for waiting in considered] == [11, 10]
    settled = scored.settled()
    assert {delivery.payload for delivery in settled} == {b""}, "entries wait for a checkpoint without their payloads"
    assert await scored.ack(settled) == [group_id(number) for number in ORDER[:10]]


async def test_the_groups_of_evaluations_are_acked_as_they_arrive_and_never_considered(
    redis: Redis, run_keys: RunKeys
) -> None:
    label = evaluation_id(incarnation=1, step=10, index=3)
    await redis.xadd(run_keys.scored, {"group_id": label, "payload": encode(scored_group(label))})
    await redis.hset(run_keys.started, label, "10")
    scored = scored_groups(redis, run_keys, incarnation=1)
    assert await scored.receive(block_s=0.1) == 1
    assert [group.prompt.group_id for group in scored.take_evaluated()] == [label]
    assert scored.take_evaluated() == []
    assert (scored.consider(), scored.numbers()) == (None, set())
    assert await redis.xlen(run_keys.scored) == 0
    assert await redis.hlen(run_keys.started) == 0


async def test_a_scored_group_that_was_never_admitted_is_buried(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    trainer = await Trainer.start(redis, run_keys, run_config)
    await trainer.admission.admit(2)
    await generate(redis, run_keys)
    await score(redis, run_keys)
    await redis.xadd(run_keys.scored, {"group_id": "00500000", "payload": encode(scored_group("00500000"))})

    assert await trainer.step() == [0, 1]
    ((_, letter),) = await entries(redis, run_keys.dead)
    assert letter["reason"] == b"no group '00500000' was admitted"
    assert trainer.ledger.admitted == 2


@pytest.mark.parametrize(
    ("label", "run_id", "reason"),
    [
        ("00000001", "run-test", b"the entry is labelled '00000001' but holds group '00000000'"),
        ("00000000", "run-other", b"the entry is on a stream of run run-test but holds a group of run run-other"),
    ],
)
async def test_a_group_is_what_its_entry_is_labelled_and_of_its_run(
    label: str, run_id: str, reason: bytes, redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    trainer = await Trainer.start(redis, run_keys, run_config)
    await trainer.admission.admit(2)
    group = scored_group("00000000")
    group = msgspec.structs.replace(group, prompt=msgspec.structs.replace(group.prompt, run_id=run_id))
    await redis.xadd(run_keys.scored, {"group_id": label, "payload": encode(group)})

    assert await trainer.step() == []
    ((_, letter),) = await entries(redis, run_keys.dead)
    assert letter["reason"] == reason
