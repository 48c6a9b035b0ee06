"""Plays generator and rewarder from a script: a group's number decides its content, and the order of arrival is fixed.

    admitted numbers --> [kept until their turn] --> scored, in the script's order

So the generator's part is the same in every run, and any difference between two runs comes from the trainer. The order
is shuffled within two batches at a time, so that groups overtake each other and the trainer waits for stragglers.
"""

import asyncio
import random
from collections.abc import Iterator

import numpy as np

from services.trainer.groups.schedule import BatchShape
from shared.messages import CompletedGroup, PromptGroup, decode_completed_group, decode_prompt_group
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.streams import Delivery
from shared.run_options.run_config import RunConfig
from tests.tiny_model import VOCAB_SIZE
from tests.trainer.played import hand_on_completed, hand_on_scored, rollout_of, scored, seats


class ScriptedServices:
    """The services of one run whose admission window is two batches.

    Args:
        redis: The Redis with the run's streams.
        run_id: The run's id.
        config: The run's config.
        seed: Seed of contents and order.
    """

    def __init__(self, redis: Redis, run_id: str, config: RunConfig, *, seed: int) -> None:
        self._max_published: int | None = None
        self._redis = redis
        self._keys = RunKeys(run_id)
        self._shape = BatchShape.of(config)
        self._block = 2 * self._shape.groups(num_steps=self._shape.steps)
        self._seed = seed
        self._admitted: dict[int, Delivery] = {}
        self._num_published = 0
        self._order = self._orders()
        self._next = next(self._order)
        self._prompts, self._completions = seats(redis, self._keys)

    def _orders(self) -> Iterator[int]:
        rng = random.Random(self._seed)
        first = 0
        while True:
            block = list(range(first, first + self._block))
            rng.shuffle(block)
            yield from block
            first += self._block

    def publish_blocks(self, count: int | None) -> None:
        """Publish at most this many shuffled blocks of two batches; None sets no limit."""
        self._max_published = None if count is None else count * self._block

    async def play(self) -> None:
        """Serve until cancelled."""
        while True:
            for delivery in await self._prompts.read(count=64, block_s=0.02):
                number = int(delivery.group_id)
                self._admitted[number] = delivery
                await self._redis.hset(self._keys.started, delivery.group_id, str(self._version(number)))
            while self._next in self._admitted and self._may_publish():
                await self._publish(self._admitted.pop(self._next))
                self._next = next(self._order)
                self._num_published += 1
            await asyncio.sleep(0)

    def _may_publish(self) -> bool:
        return self._max_published is None or self._num_published < self._max_published

    def _version(self, number: int) -> int:
        """Return the last pushed version at the time when this number was admitted: two batches are in flight."""
        return max(0, number // self._shape.groups(num_steps=self._shape.steps) - 1) * self._shape.steps

    async def _publish(self, delivery: Delivery) -> None:
        group = self._completed(decode_prompt_group(delivery.payload))
        await hand_on_completed(delivery, group, self._keys)
        (completed,) = await self._completions.read(count=1, block_s=5.0)
        rng = np.random.default_rng([self._seed, int(delivery.group_id), 1])
        rewards = [float(reward) for reward in rng.integers(0, 2, len(group.rollouts))]
        await hand_on_scored(completed, scored(decode_completed_group(completed.payload), rewards), self._keys)

    def _completed(self, prompt: PromptGroup) -> CompletedGroup:
        rng = np.random.default_rng([self._seed, int(prompt.group_id)])
        rollouts = tuple(
            rollout_of(
                prompt,
                branch,
                completion_ids=(ids := rng.integers(4, VOCAB_SIZE, int(rng.integers(1, 9))).astype(np.int32)),
                logprobs=(-4.0 - rng.random(ids.size)).tolist(),
                policy_version=self._version(int(prompt.group_id)),
            )
            for branch in range(prompt.num_generations)
        )
        return CompletedGroup(prompt=prompt, rollouts=rollouts)
