"""Keeps a bounded number of prompt groups in flight through the engine.

    prompts --> gate --> [in flight: <= max_inflight_groups] --> completions
                 |
                 open while this replica holds the version the trainer requires

Generation never waits for training: when the trainer falls behind, it stops admitting prompts, this loop runs dry, and
nothing is sampled that would be too stale to use. A group is published whole or not at all; one that is not stays
pending under this replica's name. Weight pushes are weight_receiver.py's business: a group in flight while weights
change simply goes on, and its version spans say so.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from services.generator.metrics import GeneratorMetrics
from services.generator.rollouts import Completion, completed_group
from shared.arrays import unpack_ids
from shared.errors import MessageError
from shared.keys import GENERATORS, RunKeys
from shared.messages import decode_prompt_group, encode
from shared.redis_connection import Redis, patiently
from shared.run_config import RunConfig
from shared.streams import Delivery, StreamConsumer, settle

log = logging.getLogger(__name__)

READ_BLOCK_S = 0.5
"""Short, so that a gate that closes is noticed before many more prompts are claimed."""


class Engine(Protocol):
    """What the loop needs of vLLM; engine.py has the real one."""

    async def complete(
        self, prompt_ids: Sequence[int], *, num_completions: int, config: RunConfig, request_id: str
    ) -> Sequence[Completion]:
        """Sample; raises MessageError for a prompt the model cannot take. Cancelling it aborts the request."""
        ...


class WeightGate(Protocol):
    """What the loop needs of the weight receiver."""

    @property
    def policy_version(self) -> int:
        """Version held; -1 is none of this run's."""
        ...

    async def wait_open(self, required: int) -> None:
        """Return once the version held is at least ``required`` and decoding is not held."""
        ...


class GenerationLoop:
    """One run's prompts through one engine.

    Args:
        redis: Client of redis_connection.py.
        keys: The run.
        config: Its sampling settings.
        engine: Samples.
        gate: Says which version is held.
        replica_id: Name of this consumer; stable, so that a restart finds its own pending groups.
        metrics: Counts.
        patience_s: How long Redis may be away.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        keys: RunKeys,
        config: RunConfig,
        engine: Engine,
        gate: WeightGate,
        replica_id: str,
        metrics: GeneratorMetrics,
        patience_s: float = 60.0,
    ) -> None:
        self.required_version = -1
        self._redis = redis
        self._keys = keys
        self._config = config
        self._engine = engine
        self._gate = gate
        self._replica_id = replica_id
        self._metrics = metrics
        self._patience_s = patience_s
        self._num_inflight = 0
        self._place_freed = asyncio.Event()
        self._prompts = StreamConsumer(
            redis,
            stream=keys.prompts,
            consumer_group=GENERATORS,
            name=replica_id,
            leases=keys.leases(GENERATORS),
            dead=keys.dead,
        )

    async def run(self) -> None:
        """Generate until cancelled; then every request in flight is aborted, and its group stays pending.

        Raises:
            ExceptionGroup: Of the first failure: the engine died, Redis stayed away, or its streams are gone.
        """
        async with asyncio.TaskGroup() as groups:
            while True:
                await self._until_open()
                num_free = await self._num_free_places()
                for delivery in await self._prompts.read(count=num_free, block_s=READ_BLOCK_S):
                    self._num_inflight += 1
                    groups.create_task(self._generate(delivery), name=f"group {delivery.group_id}")

    async def _until_open(self) -> None:
        while True:
            raw = await patiently(
                lambda: self._redis.get(self._keys.required_version),
                what="reading the required policy version",
                timeout_s=self._patience_s,
            )
            self.required_version = -1 if raw is None else int(raw)
            # The required version may rise while we wait for an older one: ask again now and then.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READ_BLOCK_S):
                    # Before the first push of the run nothing is held, whatever is required.
                    return await self._gate.wait_open(max(0, self.required_version))

    async def _num_free_places(self) -> int:
        while self._num_inflight >= self._config.max_inflight_groups:
            self._place_freed.clear()
            await self._place_freed.wait()
        return self._config.max_inflight_groups - self._num_inflight

    async def _generate(self, delivery: Delivery) -> None:
        self._metrics.inflight.inc()
        try:
            async with settle(delivery):
                await self._generate_one(delivery)
        finally:
            self._metrics.inflight.dec()
            self._num_inflight -= 1
            self._place_freed.set()

    async def _generate_one(self, delivery: Delivery) -> None:
        prompt = decode_prompt_group(delivery.payload)
        if (prompt.run_id, prompt.group_id) != (self._keys.run_id, delivery.group_id):
            raise MessageError(f"group {prompt.group_id} of run {prompt.run_id} is on the wrong stream or entry")
        claimed_at_s = time.time()
        version = self._gate.policy_version
        await patiently(
            lambda: self._redis.hset(self._keys.started, prompt.group_id, str(version)),
            what="noting the start of a group",
            timeout_s=self._patience_s,
        )
        completions = await self._engine.complete(
            unpack_ids(prompt.prompt_ids).tolist(),
            num_completions=prompt.num_generations,
            config=self._config,
            request_id=f"{prompt.run_id}-{prompt.group_id}",
        )
        group = completed_group(
            prompt, completions, claimed_at_s=claimed_at_s, generated_at_s=time.time(), by=self._replica_id
        )
        self._metrics.tokens.inc(sum(len(completion.token_ids) for completion in completions))
        if await delivery.hand_off(self._keys.completions, self._keys.seen(self._keys.completions), encode(group)):
            self._metrics.published.inc()
        else:
            self._metrics.duplicates.inc()
