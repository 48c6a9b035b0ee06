"""A resumed trainer accounts for every group. tests/fundamentals/test_accounting.py has the most frequent cases."""

from typing import Any

import pytest

from services.trainer.groups.group_ids import evaluation_id
from services.trainer.groups.ledger import DEAD_LETTER
from services.trainer.intake.admission_pace import AdmissionPace
from shared.messages import encode
from shared.redis.keys import GENERATORS, TRAINERS, RunKeys
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
from tests.groups import completed_group
from tests.stream_view import entries
from tests.trainer.bookkeeping import Trainer, consumer, generate, score

pytestmark = pytest.mark.unit


async def test_a_group_admitted_again_travels_all_the_way_although_it_was_seen_before(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    trainer = await Trainer.start(redis, run_keys, run_config)
    older = trainer.ledger.to_json()
    await trainer.admission.admit(2)
    await generate(redis, run_keys)
    await score(redis, run_keys)
    await trainer.receive()
    # The scored entries are lost, but the seen sets still contain their ids: the worst case for a second try.
    for entry_id, _ in await entries(redis, run_keys.scored):
        await redis.xack(run_keys.scored, TRAINERS, entry_id)
        await redis.xdel(run_keys.scored, entry_id)

    successor = await Trainer.start(redis, run_keys, run_config, checkpoint={**older, "admitted": 2})
    await successor.admission.admit(2)
    await generate(redis, run_keys)
    await score(redis, run_keys)

    assert await successor.step() == [0, 1]


async def test_after_a_crash_prompts_wait_until_what_was_sampled_since_the_checkpoint_is_trained(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    """Generator and rank die together: unfinished groups would be sampled with weights as old as the checkpoint."""
    trainer = await Trainer.start(redis, run_keys, run_config)
    await trainer.admission.admit(3)
    checkpoint = trainer.ledger.to_json()
    await trainer.admission.admit(5)
    for delivery in await consumer(redis, run_keys, run_keys.prompts, GENERATORS, "generator-0").read(count=6):
        if delivery.group_id not in ("00000001", "00000005"):  # under way, as the generator dies
            payload = encode(completed_group(delivery.group_id))
            await delivery.hand_off(run_keys.completions, run_keys.seen(run_keys.completions), payload)
    await score(redis, run_keys)

    successor = await Trainer.start(redis, run_keys, run_config, checkpoint=checkpoint)
    assert [fields["group_id"] for _, fields in await entries(redis, run_keys.prompts)] == [b"00000001"]
    assert successor.ledger.in_flight() == list(range(8))
    eager = run_config.model_copy(update={"admission": "eager"})
    pace = AdmissionPace(eager, ledger=successor.ledger)  # at most six in flight

    def num_to_admit() -> int:
        num_unadmitted = successor.admission.num_unadmitted
        return pace.num_to_admit(num_unadmitted=num_unadmitted, num_waiting=0, num_steps_left=9, paused_by=None)

    assert (successor.admission.num_unadmitted, num_to_admit()) == (3, 1)
    assert await successor.step() == [0, 2]
    assert num_to_admit() == 3
    assert await successor.admission.admit(3) == [5, 6, 7]
    for _ in range(2):  # the generator's unfinished groups come first
        await generate(redis, run_keys)
    await score(redis, run_keys)
    trained = [number for _ in range(3) for number in await successor.step()]
    assert sorted(trained) == [1, 3, 4, 5, 6, 7]


async def test_a_group_that_was_taken_back_and_arrives_after_all_is_trained_and_not_sampled_again(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    trainer = await Trainer.start(redis, run_keys, run_config)
    checkpoint = trainer.ledger.to_json()
    await trainer.admission.admit(2)
    under_way = await consumer(redis, run_keys, run_keys.prompts, GENERATORS, "generator-0").read(count=1)

    successor = await Trainer.start(redis, run_keys, run_config, checkpoint=checkpoint)
    assert successor.admission.num_unadmitted == 2
    payload = encode(completed_group(under_way[0].group_id))
    await under_way[0].hand_off(run_keys.completions, run_keys.seen(run_keys.completions), payload)
    await score(redis, run_keys)
    await successor.receive()
    successor.admission.leave_out(successor.scored.numbers())
    assert await successor.admission.admit(1) == [1]
    await generate(redis, run_keys)
    await score(redis, run_keys)
    assert await successor.step() == [0, 1]


async def test_prompts_of_an_evaluation_that_a_crash_cut_off_are_not_sampled(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    await Trainer.start(redis, run_keys, run_config)
    label = evaluation_id(incarnation=1, step=2, index=0)
    await redis.xadd(run_keys.prompts, {"group_id": label, "payload": b"prompt"})
    await Trainer.start(redis, run_keys, run_config)
    assert await entries(redis, run_keys.prompts) == []


@pytest.mark.parametrize("label", ["00500000", "500000", "9" * 5000, "00000003", "eval-x", "\u0663"])
@pytest.mark.parametrize("where", ["dead", "prompts", "completions", "scored"])
async def test_the_label_of_an_entry_admits_nothing(
    label: str, where: str, redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    """Three groups are admitted, and the first is buried. Another client leaves an entry with a made-up group id."""
    first = await Trainer.start(redis, run_keys, run_config)
    await first.admission.admit(3)
    (delivery,) = await consumer(redis, run_keys, run_keys.prompts, GENERATORS, "generator-0").read(
        count=1, block_s=0.05
    )
    await delivery.bury("it kills the engine")
    fields: dict[Any, Any] = {"group_id": label, "payload": b"garbage", "reason": "why", "stream": run_keys.scored}
    await redis.xadd(getattr(run_keys, where), fields)

    successor = await Trainer.start(redis, run_keys, run_config)

    assert successor.ledger.admitted == 3
    assert successor.ledger.dropped_by_reason() == {DEAD_LETTER: 1}
    assert successor.admission.num_unadmitted == 2, "exactly the groups that were not sampled"
    assert successor.ledger.in_flight() == [1, 2]
