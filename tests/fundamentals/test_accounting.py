"""Why no group is lost or trained twice if any process dies: admission, takeover, and acks after the checkpoint.

Read after test_streams.py. Everything runs on a real Redis. Generator and rewarder are replaced by two hand-offs.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from services.trainer.fence import check_not_fenced, take_over
from services.trainer.groups.group_ids import evaluation_id, group_id
from services.trainer.groups.ledger import DEAD_LETTER, Ledger
from services.trainer.intake.admission import Admission
from services.trainer.intake.admission_pace import AdmissionPace
from services.trainer.intake.batch_builder import BatchBuilder
from services.trainer.intake.reconcile import missing_groups, withdraw_unsampled
from services.trainer.intake.scored_groups import ScoredGroups
from shared.errors import FencedError, StateLostError, UserError
from shared.messages import Prompt, encode
from shared.redis.keys import GENERATORS, REWARDERS, TRAINERS, RunKeys
from shared.redis.lease import renew
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.redis.streams import StreamConsumer
from shared.run_options.run_config import RunConfig
from tests.groups import completed_group, scored_group
from tests.stream_view import entries

pytestmark = pytest.mark.unit


@dataclass
class FakeRow:
    prompt: Prompt = "abc"
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    problem: str | None = None


class FakeRows:
    def __init__(self, problems: dict[int, str] | None = None) -> None:
        self.problems = problems or {}

    def row_at(self, admission_number: int) -> FakeRow:
        return FakeRow(problem=self.problems.get(admission_number))


class FakeEncoder:
    def encode(self, prompt: Prompt) -> list[int]:
        return [5, 6, 7]


def consumer(
    redis: Redis,
    keys: RunKeys,
    stream: str,
    consumer_group: str,
    name: str,
    *,
    reclaim_every_s: float | None = None,
    look_every_s: float = 5.0,
) -> StreamConsumer:
    return StreamConsumer(
        redis,
        stream=stream,
        consumer_group=consumer_group,
        name=name,
        leases=keys.leases(consumer_group),
        dead=keys.dead,
        reclaim_every_s=reclaim_every_s,
        max_deliveries=None,
        look_every_s=look_every_s,
    )


class Trainer:
    """The trainer's bookkeeping without a model."""

    def __init__(self, redis: Redis, keys: RunKeys, config: RunConfig, *, ledger: Ledger, incarnation: int) -> None:
        self.ledger = ledger
        self.scored = ScoredGroups(
            redis,
            keys=keys,
            ledger=ledger,
            incarnation=incarnation,
            consumer=consumer(redis, keys, keys.scored, TRAINERS, f"trainer-{incarnation}", reclaim_every_s=0.0),
        )
        self.batches = BatchBuilder(config, scored=self.scored, ledger=ledger)
        self.admission = Admission(
            redis,
            keys=keys,
            config=config,
            rows=FakeRows(),
            encoder=FakeEncoder(),
            ledger=ledger,
            incarnation=incarnation,
        )

    @classmethod
    async def start(
        cls, redis: Redis, keys: RunKeys, config: RunConfig, *, checkpoint: dict[str, object] | None = None
    ) -> "Trainer":
        incarnation = await take_over(redis, keys)
        ledger = Ledger() if checkpoint is None else Ledger.from_json(checkpoint)
        trainer = cls(redis, keys, config, ledger=ledger, incarnation=incarnation)
        await renew(redis, leases=keys.leases(TRAINERS), consumer=f"trainer-{incarnation}", lease_s=60)
        await withdraw_unsampled(redis, keys, ledger, incarnation=incarnation)
        trainer.admission.admit_again(await missing_groups(redis, keys, ledger))
        return trainer

    async def receive(self) -> None:
        await self.scored.receive(block_s=0.05)
        while (waiting := self.scored.consider()) is not None:
            self.batches.judge(waiting)

    async def step(self) -> list[int]:
        """Train the available groups; return their numbers."""
        await self.receive()
        batch = self.batches.choose(policy_version=0, started={}, num_steps_left=4)
        self.batches.take(batch, step=1)
        return [group.number for group in batch.groups]


async def generate(redis: Redis, keys: RunKeys) -> None:
    """Complete all groups that wait on the prompts stream."""
    for delivery in await consumer(redis, keys, keys.prompts, GENERATORS, "generator-0").read(count=64, block_s=0.05):
        payload = encode(completed_group(delivery.group_id))
        await delivery.hand_off(keys.completions, keys.seen(keys.completions), payload)


async def score(redis: Redis, keys: RunKeys) -> None:
    """Score all groups that wait on the completions stream."""
    stream = consumer(redis, keys, keys.completions, REWARDERS, "rewarder-0")
    for delivery in await stream.read(count=64, block_s=0.05):
        payload = encode(scored_group(delivery.group_id))
        await delivery.hand_off(keys.scored, keys.seen(keys.scored), payload)


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
    await trainer.scored.ack(trainer.scored.settled())  # after the newer checkpoint, which now turns out to be damaged

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
    with pytest.raises(FencedError, match="epoch 1 of run run-test was superseded by 2"):
        await check_not_fenced(redis, run_keys, 1)  # the saver asks this before every checkpoint
    await check_not_fenced(redis, run_keys, 2)
    assert await new.step() == [0, 1]


async def test_an_old_trainer_that_wakes_up_takes_nothing_from_the_new_one_for_good(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    old = await Trainer.start(redis, run_keys, run_config)
    new = await Trainer.start(redis, run_keys, run_config)
    await new.admission.admit(2)
    await generate(redis, run_keys)
    await score(redis, run_keys)
    await renew(redis, leases=run_keys.leases(TRAINERS), consumer="trainer-1", lease_s=60)  # it has just woken up
    await old.receive()
    assert old.scored.numbers() == {0, 1}
    assert await new.step() == []

    with pytest.raises(FencedError):  # after half a second it looks at the run, ends, and releases its lease
        await check_not_fenced(redis, run_keys, 1)
    await redis.zrem(run_keys.leases(TRAINERS), "trainer-1")

    assert await new.step() == [0, 1]


async def test_a_redis_that_was_restored_from_an_older_state_is_lost_state_and_not_a_rival(
    redis: Redis, run_keys: RunKeys
) -> None:
    await redis.set(run_keys.epoch, 3)
    with pytest.raises(StateLostError, match="went back in time"):
        await check_not_fenced(redis, run_keys, 4)


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
    pace = AdmissionPace(run_config, ledger=successor.ledger)  # at most six in flight

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


async def test_a_garbage_payload_on_the_scored_stream_is_buried_and_blocks_nobody(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    trainer = await Trainer.start(redis, run_keys, run_config)
    await redis.xadd(run_keys.scored, {"group_id": "00000009", "payload": b"\xc1 not msgpack"})
    await trainer.admission.admit(2)
    await generate(redis, run_keys)
    await score(redis, run_keys)

    assert await trainer.step() == [0, 1]
    ((_, letter),) = await entries(redis, run_keys.dead)
    assert letter["group_id"] == b"00000009"
    assert b"not a" in letter["reason"]


@pytest.mark.parametrize("label", ["00500000", "500000", "9" * 5000, "00000003", "eval-x", "\u0663"])
@pytest.mark.parametrize("where", ["dead", "prompts", "completions", "scored"])
async def test_what_an_entry_calls_itself_admits_nothing(
    label: str, where: str, redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    """Three groups are admitted and one of them is buried. Another client leaves an entry with a made-up group id."""
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
    assert successor.admission.num_unadmitted == 2, "those that nobody has sampled, and no others"
    assert successor.ledger.in_flight() == [1, 2]


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


async def test_a_row_without_a_prompt_is_dropped_and_the_next_row_takes_its_place(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    ledger = Ledger()
    admission = Admission(
        redis,
        keys=run_keys,
        config=run_config,
        rows=FakeRows({1: "it has no prompt"}),
        encoder=FakeEncoder(),
        ledger=ledger,
        incarnation=1,
    )
    await admission.admit(2)
    assert ledger.admitted == 3
    assert ledger.dropped_by_reason() == {"bad_row": 1}
    assert [fields["group_id"] for _, fields in await entries(redis, run_keys.prompts)] == [b"00000000", b"00000002"]


async def test_a_data_set_without_a_usable_row_ends_the_run_with_a_sentence(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    rows = FakeRows(dict.fromkeys(range(2000), "it has no prompt"))
    admission = Admission(
        redis, keys=run_keys, config=run_config, rows=rows, encoder=FakeEncoder(), ledger=Ledger(), incarnation=1
    )
    with pytest.raises(UserError, match=r"the last 1000 rows .* it has no prompt"):
        await admission.admit(1)


async def test_a_trainer_does_not_start_on_a_redis_that_lost_the_run(redis: Redis, run_keys: RunKeys) -> None:
    await redis.delete(*run_keys.everything())
    with pytest.raises(StateLostError, match="does not hold run run-test"):
        await take_over(redis, run_keys)
    assert await redis.exists(run_keys.epoch) == 0


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
