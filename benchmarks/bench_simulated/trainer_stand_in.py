"""The trainer without training: its admission, its choice of batches and its pushes, with steps that take no time.

    Admission, AdmissionPace --> prompts ... scored --> ScoredGroups, BatchBuilder --> one version on --> WeightSender

All of these are the trainer's own classes. Only the model is missing: the weights are a few numbers, groups are settled
as soon as they are chosen, and their entries are acked at once, as after a checkpoint.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from services.trainer.groups.group_ids import training_number
from services.trainer.groups.ledger import Ledger
from services.trainer.intake.admission import Admission
from services.trainer.intake.admission_pace import AdmissionPace
from services.trainer.intake.batch_builder import BatchBuilder
from services.trainer.intake.scored_groups import ScoredGroups
from services.trainer.push.push_settings import PushSettings
from services.trainer.push.weight_sender import WeightSender
from shared.lineage import LineageVersion
from shared.messages import Prompt
from shared.redis.keys import TRAINERS, RunKeys
from shared.redis.lease import lease
from shared.redis.redis_connection import Redis
from shared.redis.streams import StreamConsumer
from shared.run_options.run_config import RunConfig

_NAME = "trainer-1"
_STEPS_LEFT = 1 << 40
_RECEIVE_BLOCK_S = 0.2
_LOOK_EVERY_S = 0.5
_WEIGHTS = {f"layer.{number}.weight": torch.zeros(16) for number in range(4)}


@dataclass
class Seen:
    """Counts of the stand-in so far; they never fall."""

    num_arrived: int = 0
    num_groups: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    max_staleness: int = 0
    max_in_flight: int = 0
    num_unconfirmed: int = 0
    push_s: list[float] = field(default_factory=list[float])


@dataclass(frozen=True)
class _Row:
    prompt: Prompt
    columns: dict[str, Any]
    problem: str | None = None


class _Rows:
    def row_at(self, admission_number: int) -> _Row:
        """Return a row that contains its number."""
        return _Row(f"prompt {admission_number}", {"solution": str(admission_number)})


class _Encoder:
    """Returns as many token ids as a prompt of the run has."""

    def __init__(self, num_tokens: int) -> None:
        self._ids = [1 + index % 1000 for index in range(num_tokens)]

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the same ids for every prompt."""
        del prompt
        return self._ids


class TrainerStandIn:
    """The consuming end of one run.

    Args:
        redis: Client made by redis_connection.py.
        run_id: The run's id.
        config: Config of the run.
        internal_key: Key of the generators' internal routes.
        num_prompt_tokens: Length of every prompt, in tokens.
    """

    def __init__(
        self, redis: Redis, *, run_id: str, config: RunConfig, internal_key: str, num_prompt_tokens: int
    ) -> None:
        keys = RunKeys(run_id)
        self.seen = Seen()
        self._redis, self._keys = redis, keys
        self._version = 0
        self._looked_at = 0.0
        self._ledger = Ledger()
        consumer = StreamConsumer(
            redis, stream=keys.scored, consumer_group=TRAINERS, name=_NAME, leases=keys.leases(TRAINERS),
            dead=keys.dead, max_deliveries=None,
        )  # fmt: skip
        self._scored = ScoredGroups(redis, keys=keys, ledger=self._ledger, incarnation=1, consumer=consumer)
        self._batches = BatchBuilder(config, scored=self._scored, ledger=self._ledger)
        self._pace = AdmissionPace(config, ledger=self._ledger)
        self._admission = Admission(
            redis, keys=keys, config=config, rows=_Rows(), encoder=_Encoder(num_prompt_tokens), ledger=self._ledger,
            incarnation=1,
        )  # fmt: skip
        settings = PushSettings(
            run_id=run_id,
            internal_key=internal_key,
            transport="auto",
            push_timeout_s=config.push_timeout_s,
            incarnation=1,
        )
        self._sender = WeightSender(redis, settings)

    async def run(self) -> None:
        """Consume until cancelled."""
        await self._redis.set(self._keys.epoch, 1)
        async with lease(self._redis, leases=self._keys.leases(TRAINERS), consumer=_NAME):
            try:
                while not await self._sender.needs_push():  # noqa: ASYNC110  waits until a generator has started
                    await asyncio.sleep(0.2)
                await self._push()
                while True:
                    await self._turn()
            finally:
                await self._sender.close()

    async def _push_if_needed(self) -> None:
        """Check the fleet as often as the trainer does, and push if a replica needs weights."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        if await self._sender.needs_push():
            await self._push()

    async def _turn(self) -> None:
        await self._push_if_needed()
        count = self._pace.num_to_admit(
            num_unadmitted=0, num_waiting=len(self._scored.numbers()), num_steps_left=_STEPS_LEFT, paused_by=None
        )
        await self._admission.admit(count)
        self.seen.max_in_flight = max(self.seen.max_in_flight, self._ledger.num_in_flight)
        batch = self._batches.choose(
            policy_version=self._version, started=await self._started(), num_steps_left=_STEPS_LEFT
        )
        if not batch.groups:
            if not self._consider():
                self.seen.num_arrived += await self._scored.receive(block_s=_RECEIVE_BLOCK_S)
            while self._batches.num_missing(num_steps_left=_STEPS_LEFT) and self._consider():
                pass
            return
        seen = self.seen
        for waiting in batch.groups:
            seen.max_staleness = max(seen.max_staleness, self._version - waiting.oldest_policy_version)
            seen.num_tokens += sum(rollout.num_sampled for rollout in waiting.group.rollouts)
        self._batches.take(batch, step=self._version + 1)
        await self._scored.ack(self._scored.settled())
        seen.num_groups += len(batch.groups)
        seen.num_steps += 1
        self._version += 1
        await self._push()

    def _consider(self) -> bool:
        waiting = self._scored.consider()
        if waiting is not None:
            self._batches.judge(waiting)
        return waiting is not None

    async def _push(self) -> None:
        began = time.monotonic()
        result = await self._sender.push(_WEIGHTS.items, policy_version=self._version)
        self.seen.push_s.append(time.monotonic() - began)
        self.seen.num_unconfirmed += len(result.failed) + (not result.is_confirmed)

    async def _started(self) -> dict[int, int]:
        found: Any = await self._redis.hgetall(self._keys.started)
        numbers = {
            training_number(label.decode()): LineageVersion.parse(version.decode()).policy_version
            for label, version in found.items()
        }
        return {number: version for number, version in numbers.items() if number is not None}
