"""Chapter 5: accounting. Why no group is lost and none is trained twice, even if a process dies.

The trainer records the outcome of every group in a ledger, and each checkpoint contains the ledger next to the weights.
So "trained" means: trained in the weights that survive. A group's entry stays on the scored stream until a
checkpoint contains the group. After a crash, a new trainer takes over. It loads the newest checkpoint and finds every
other group on a stream, among the dead letters, or nowhere. A group that is nowhere is admitted again. An old trainer
that is still alive can no longer change anything.

The code is in services/trainer/groups/ledger.py, intake/reconcile.py and fence.py.
"""

import pytest

from services.trainer.fence import check_not_fenced, take_over
from services.trainer.groups.group_ids import group_id
from services.trainer.groups.ledger import DEAD_LETTER, Ledger
from shared.errors import FencedError, StateLostError
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
from tests.trainer.bookkeeping import Trainer, consumer, generate, score

pytestmark = pytest.mark.unit


def test_every_admitted_group_is_trained_dropped_or_in_flight() -> None:
    ledger = Ledger(admitted=5)
    ledger.record_trained(0)
    ledger.record_trained(3)
    ledger.record_dropped(1, "zero_std")
    assert ledger.in_flight() == [2, 4]
    assert (ledger.num_trained, ledger.num_dropped, ledger.num_in_flight) == (2, 1, 2)
    assert ledger.dropped_by_reason() == {"zero_std": 1}


def test_training_a_group_twice_is_refused() -> None:
    ledger = Ledger(admitted=1)
    ledger.record_trained(0)
    with pytest.raises(AssertionError, match="00000000 was settled before"):
        ledger.record_trained(0)


async def test_an_entry_is_acked_only_after_a_checkpoint_holds_its_group(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    trainer = await Trainer.start(redis, run_keys, run_config)
    await trainer.admission.admit(2)
    await generate(redis, run_keys)
    await score(redis, run_keys)
    assert await trainer.step() == [0, 1]
    assert await redis.xlen(run_keys.scored) == 2, "trained, but no checkpoint yet"

    await trainer.scored.ack(trainer.scored.settled())  # as the saver does once a checkpoint is published

    assert await redis.xlen(run_keys.scored) == 0
    for stream in (run_keys.prompts, run_keys.completions, run_keys.scored):
        assert await redis.scard(run_keys.seen(stream)) == 0, "settled ids leave the seen sets, which bounds them"


async def test_a_trainer_that_died_before_its_checkpoint_trains_the_same_groups_again(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    trainer = await Trainer.start(redis, run_keys, run_config)
    await trainer.admission.admit(2)
    await generate(redis, run_keys)
    await score(redis, run_keys)
    assert await trainer.step() == [0, 1]

    successor = await Trainer.start(redis, run_keys, run_config)

    assert successor.ledger.admitted == 2, "found on the streams, not admitted again"
    assert await redis.xlen(run_keys.prompts) == 0
    assert await successor.step() == [0, 1]


async def test_a_trainer_that_died_between_checkpoint_and_ack_trains_nothing_twice(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    trainer = await Trainer.start(redis, run_keys, run_config)
    await trainer.admission.admit(2)
    await generate(redis, run_keys)
    await score(redis, run_keys)
    assert await trainer.step() == [0, 1]
    checkpoint = trainer.ledger.to_json()

    successor = await Trainer.start(redis, run_keys, run_config, checkpoint=checkpoint)

    assert await successor.step() == []
    await successor.scored.ack(successor.scored.settled())
    assert await redis.xlen(run_keys.scored) == 0
    assert (successor.ledger.num_trained, successor.ledger.num_in_flight) == (2, 0)


async def test_resuming_from_an_older_checkpoint_admits_again_what_was_acked_since(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    trainer = await Trainer.start(redis, run_keys, run_config)
    older = trainer.ledger.to_json()
    await trainer.admission.admit(4)
    await generate(redis, run_keys)
    await score(redis, run_keys)
    assert await trainer.step() == [0, 1]
    await trainer.scored.ack(trainer.scored.settled())  # after the newer checkpoint, which turns out to be damaged

    successor = await Trainer.start(redis, run_keys, run_config, checkpoint=older)
    assert successor.admission.num_unadmitted == 2
    await successor.admission.admit(2)

    assert successor.admission.num_unadmitted == 0
    assert [d.group_id for d in await consumer(redis, run_keys, run_keys.prompts, GENERATORS, "g").read(count=9)] == [
        group_id(0),
        group_id(1),
    ]
    assert successor.ledger.in_flight() == [0, 1, 2, 3]
    assert await successor.step() == [2, 3], "already scored: not generated again"


async def test_a_buried_group_is_dropped_with_its_reason_at_the_next_start(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    trainer = await Trainer.start(redis, run_keys, run_config)
    await trainer.admission.admit(2)
    stream = consumer(redis, run_keys, run_keys.prompts, GENERATORS, "generator-0")
    (poison, _) = await stream.read(count=2, block_s=0.1)
    await poison.bury("it kills the engine")

    successor = await Trainer.start(redis, run_keys, run_config)

    assert successor.ledger.dropped_by_reason() == {DEAD_LETTER: 1}
    assert successor.ledger.in_flight() == [1]


async def test_an_old_trainer_that_wakes_up_can_neither_admit_nor_ack(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    old = await Trainer.start(redis, run_keys, run_config)
    await old.admission.admit(2)
    await generate(redis, run_keys)
    await score(redis, run_keys)
    assert await old.step() == [0, 1]

    new = await Trainer.start(redis, run_keys, run_config)

    with pytest.raises(FencedError):
        await old.admission.admit(1)
    with pytest.raises(FencedError):
        await old.scored.ack(old.scored.settled())
    with pytest.raises(FencedError, match="incarnation 1 of run run-test was superseded by 2"):
        await check_not_fenced(redis, run_keys, 1)  # the saver asks this before every checkpoint
    await check_not_fenced(redis, run_keys, 2)
    assert await new.step() == [0, 1]


async def test_a_trainer_does_not_start_on_a_redis_that_lost_the_run(redis: Redis, run_keys: RunKeys) -> None:
    await redis.delete(*run_keys.everything())
    with pytest.raises(StateLostError, match="does not hold run run-test"):
        await take_over(redis, run_keys)
    assert await redis.exists(run_keys.epoch) == 0
