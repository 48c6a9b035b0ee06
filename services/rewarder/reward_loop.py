"""Reads the completed prompt groups of one run, scores them, and publishes them.

    completions --> [in flight: <= max_inflight_groups] --> scored
                      every function of the run at once, each under reward_timeout_s

Each group is a separate task, so a slow group does not delay others. A group is acked in the same step that publishes
its scores, so a rewarder that dies loses no group, and a group that was scored twice is published once. Malformed
entries are buried. run_follower.py runs one such loop for each run.
"""

import asyncio
from collections.abc import Callable

from services.rewarder.group_call import call_for, with_rewards
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.scoring import Scorer, WeightedFunction
from services.rewarder.trainer_state import TrainerState
from shared.messages import CompletedGroup, RewardOutcome, ScoredGroup, decode_completed_group, encode, require_place
from shared.redis.keys import REWARDERS, RunKeys
from shared.redis.lease import lease
from shared.redis.redis_connection import Redis
from shared.redis.streams import Delivery, StreamConsumer, bury_malformed
from shared.run_options.run_config import RunConfig
from shared.service.logs import about

_BLOCK_S = 0.5
"""Longest wait of one read. It is shorter than the drain after SIGTERM."""
_MAX_READ = 32
"""Most groups in one read. Small reads let the decoding of one overlap with receiving the next."""


class _Slots:
    """Limits the number of prompt groups in flight. Only one task may call ``some``."""

    def __init__(self, count: int) -> None:
        self._num_free = count
        self._freed = asyncio.Event()

    async def some(self) -> int:
        """Wait until a slot is free; return the number of free slots."""
        while self._num_free == 0:
            self._freed.clear()
            await self._freed.wait()
        return self._num_free

    def hold_until_done(self, task: "asyncio.Task[None]") -> None:
        """Take a slot until ``task`` is done."""
        self._num_free -= 1
        task.add_done_callback(self._free)

    def _free(self, _task: "asyncio.Task[None]") -> None:
        self._num_free += 1
        self._freed.set()


class RewardLoop:
    """Reads, scores and publishes the prompt groups of one run.

    Args:
        redis: A Redis connection that is ready, with headrace's functions loaded.
        scorer: Calls the reward functions.
        keys: The names of the run's keys in Redis.
        config: The run's settings.
        replica_id: Name of this replica. It is stable across restarts, so that the replica finds its pending entries.
        max_inflight_groups: Most groups scored at a time.
        metrics: Receives the counts.
        progress: Returns the run's progress, for reward functions that read it.
        stopping: Set when no more groups are to be read.
    """

    def __init__(
        self,
        redis: Redis,
        scorer: Scorer,
        *,
        keys: RunKeys,
        config: RunConfig,
        replica_id: str,
        max_inflight_groups: int,
        metrics: RewarderMetrics,
        progress: Callable[[], TrainerState],
        stopping: asyncio.Event,
    ) -> None:
        self._redis = redis
        self._scorer = scorer
        self._keys = keys
        self._config = config
        self._functions = [WeightedFunction(*each) for each in zip(config.reward_funcs, config.weights(), strict=True)]
        self._replica_id = replica_id
        self._max_inflight_groups = max_inflight_groups
        self._metrics = metrics
        self._progress = progress
        self._stopping = stopping
        self._completions = StreamConsumer(
            redis,
            stream=keys.completions,
            consumer_group=REWARDERS,
            name=replica_id,
            leases=keys.leases(REWARDERS),
            dead=keys.dead,
        )

    async def run(self) -> None:
        """Score groups until ``stopping`` is set and the groups in flight are done.

        Raises:
            ExceptionGroup: Holds the first failure: Redis stayed unreachable, or has lost the run.
        """
        slots = _Slots(self._max_inflight_groups)
        async with (
            lease(self._redis, leases=self._keys.leases(REWARDERS), consumer=self._replica_id),
            asyncio.TaskGroup() as groups,
        ):
            while not self._stopping.is_set():
                num_free = await slots.some()
                if self._stopping.is_set():
                    break
                for delivery in await self._completions.read(count=min(num_free, _MAX_READ), block_s=_BLOCK_S):
                    task = groups.create_task(self._score_delivery(delivery), name=f"score {delivery.group_id}")
                    slots.hold_until_done(task)

    async def _score_delivery(self, delivery: Delivery) -> None:
        with self._metrics.groups_in_flight.track_inprogress(), about(group_id=delivery.group_id):
            async with bury_malformed(delivery):
                group = decode_completed_group(delivery.payload)
                require_place(group.prompt, run_id=self._keys.run_id, label=delivery.group_id)
                payload = encode(await self._score_group(group))
                is_first = await delivery.hand_off(self._keys.scored, self._keys.seen(self._keys.scored), payload)
                self._metrics.groups.labels("scored" if is_first else "scored elsewhere").inc()
                return
        self._metrics.groups.labels("buried").inc()

    async def _score_group(self, group: CompletedGroup) -> ScoredGroup:
        call = call_for(
            group,
            state=self._progress(),
            max_completion_length=self._config.max_completion_length,
            chat_template_kwargs=self._config.chat_template_kwargs,
            reward_kwargs=self._config.reward_kwargs,
        )
        outcomes: list[tuple[RewardOutcome, ...]] = []
        if call.completions:  # none if every rollout is lost
            outcomes = await self._scorer.score(
                call,
                self._functions,
                timeout_s=self._config.reward_timeout_s,
                lane=self._keys.run_id,
                is_known_to_be_sendable=True,
            )
        return with_rewards(group, outcomes, self._config, by=self._replica_id)
