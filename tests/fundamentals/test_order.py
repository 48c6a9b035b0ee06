"""A resumed trainer chooses the same groups as the one before, because it considers arrivals in the stream's order.

Read after test_accounting.py.
"""

import pytest

from services.trainer.fence import take_over
from services.trainer.groups.group_ids import evaluation_id, group_id, training_number
from services.trainer.groups.ledger import Ledger
from services.trainer.intake.scored_groups import ScoredGroups
from shared.messages import encode
from shared.redis.keys import TRAINERS, RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.streams import StreamConsumer
from tests.groups import scored_group
from tests.stream_view import entries

pytestmark = pytest.mark.unit

ORDER = [number ^ 1 for number in range(150)]
"""1 0 3 2 5 4 ...: groups overtake each other on their way."""


def consumer(redis: Redis, keys: RunKeys, name: str) -> StreamConsumer:
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
    seat = consumer(redis, keys, f"trainer-{incarnation}")
    return ScoredGroups(redis, keys=keys, ledger=ledger or Ledger(admitted=150), incarnation=incarnation, consumer=seat)


async def test_what_several_dead_trainers_have_read_is_considered_in_the_order_of_the_stream(
    redis: Redis, run_keys: RunKeys
) -> None:
    """Trainer 2 read the older entries, trainer 10 the newer ones. Redis lists trainer 10 first. Others are unread."""
    ids = await publish(redis, run_keys)
    assert len(await consumer(redis, run_keys, "trainer-2").read(count=70)) == 70
    assert len(await consumer(redis, run_keys, "trainer-10").read(count=60)) == 60
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
    assert [waiting.number for waiting in scored.oldest_first()] == [0, 1], "equally old: the one admitted first"
    assert scored.considered() == {0, 1}


async def test_what_was_settled_before_is_not_considered_again(redis: Redis, run_keys: RunKeys) -> None:
    ids = await publish(redis, run_keys)
    ledger = Ledger(admitted=150)
    for number in range(10):
        ledger.record_trained(number)
    scored = scored_groups(redis, run_keys, incarnation=1, ledger=ledger)
    considered = await scored.recover(considered_to=ids[11])
    assert [waiting.number for waiting in considered] == [11, 10]
    assert await scored.ack(scored.settled()) == [group_id(number) for number in ORDER[:10]]


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


@pytest.mark.parametrize("label", ["eval-0001-00000010-00000003", "", "-1", "1a", "\u0664\u0662"])
def test_no_other_label_passes_for_a_training_group(label: str) -> None:
    assert training_number(label) is None
    assert training_number(group_id(42)) == 42
