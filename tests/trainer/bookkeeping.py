"""The trainer's bookkeeping without a model, on a real Redis. Generator and rewarder are one function each.

admission.admit --prompts--> generate --completions--> score --scored--> receive, step

"""

from dataclasses import dataclass, field
from typing import Any

from services.trainer.fence import take_over
from services.trainer.groups.ledger import Ledger
from services.trainer.intake.admission import Admission
from services.trainer.intake.batch_builder import BatchBuilder
from services.trainer.intake.reconcile import missing_groups, withdraw_unsampled
from services.trainer.intake.scored_groups import ScoredGroups
from shared.messages import Prompt, encode
from shared.redis.keys import GENERATORS, REWARDERS, TRAINERS, RunKeys
from shared.redis.lease import renew
from shared.redis.redis_connection import Redis
from shared.redis.streams import StreamConsumer
from shared.run_options.run_config import RunConfig
from tests.groups import completed_group, scored_group


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
