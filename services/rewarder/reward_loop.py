"""Reads completed groups of all served runs, scores them, and publishes them.

    completions --> [in flight: <= max_inflight_groups a run] --> scored
                      every function of the run at once, each under reward_timeout_s

Each group is a separate task, so a slow group does not delay others. A group is acked in the same step that publishes
its scores, so a rewarder that dies loses no group, and a group that was scored twice is published once. Malformed
entries are buried. A run that waits for its turn has no groups and costs nothing.
"""

import asyncio
import logging
from collections.abc import Sequence

from services.rewarder.group_call import call_for, call_without_rows, with_rewards
from services.rewarder.reward_call import TrainerState, require_sendable
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.scoring import Scorer, WeightedFunction
from shared.errors import StateLostError, UserError
from shared.messages import (
    CompletedGroup,
    ScoredGroup,
    decode_completed_group,
    encode,
    require_place,
)
from shared.redis.keys import REWARDERS, RunKeys
from shared.redis.lease import lease
from shared.redis.redis_connection import Redis, wait_until_back
from shared.redis.run_store import RunRecord, RunStore
from shared.redis.streams import Delivery, StreamConsumer, settle
from shared.refusals import refuse, take_back
from shared.run_options.run_config import RunConfig
from shared.service.logs import about

log = logging.getLogger(__name__)

_BLOCK_S = 0.5
"""Longest wait of one read. It is shorter than the drain after SIGTERM."""
_MAX_READ = 32
"""Most groups in one read, so that they are decoded while the next ones arrive."""


class _Slots:
    """Counts how many more groups may be read. For a single reader."""

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
    """Scores the groups of every run that is running or paused, until ``stop`` is called.

    Args:
        redis: A Redis connection that is ready, with headrace's functions loaded.
        scorer: Calls the reward functions.
        replica_id: Name of this replica. It is stable across restarts, so that the replica finds its pending entries.
        max_inflight_groups: Most groups of one run scored at a time.
        poll_every_s: Time between two looks for runs, in seconds.
        drain_s: Time for groups in flight to finish after ``stop``, in seconds.
        redis_patience_s: How long to wait for Redis after it lost a run, in seconds.
        metrics: Receives the counts.
    """

    def __init__(
        self,
        redis: Redis,
        scorer: Scorer,
        *,
        replica_id: str,
        max_inflight_groups: int,
        poll_every_s: float,
        drain_s: float,
        redis_patience_s: float,
        metrics: RewarderMetrics,
    ) -> None:
        self._redis = redis
        self._scorer = scorer
        self._replica_id = replica_id
        self._max_inflight_groups = max_inflight_groups
        self._poll_every_s = poll_every_s
        self._drain_s = drain_s
        self._redis_patience_s = redis_patience_s
        self._metrics = metrics
        self._stopping = asyncio.Event()
        self._states: dict[str, TrainerState] = {}
        self._reward_names: dict[str, list[str]] = {}

    def names_in_use(self) -> set[str]:
        """Return the reward names of the runs that are served now."""
        return {name for names in self._reward_names.values() for name in names}

    def stop(self) -> None:
        """Stop reading groups. ``run`` returns once the groups in flight are done or the drain time is over."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve all runs until ``stop`` is called.

        Raises:
            UnavailableError: Redis did not come back in time.
        """
        store = RunStore(self._redis)
        serving: dict[str, asyncio.Task[None]] = {}
        try:
            while not self._stopping.is_set():
                await self._follow(await store.served(), serving)
                await self._pause()
            if serving:
                await asyncio.wait(serving.values(), timeout=self._drain_s)
        finally:
            await _cancel(*serving.values())

    async def _follow(self, served: list[RunRecord], serving: dict[str, asyncio.Task[None]]) -> None:
        for run_id in [run_id for run_id, task in serving.items() if task.done()]:
            serving.pop(run_id).result()
        for run_id in serving.keys() - {record.run_id for record in served}:
            log.info("run %s is over", run_id, extra={"run_id": run_id})
            await _cancel(serving.pop(run_id))
        # Also for runs whose task ended by itself because Redis lost them.
        for run_id in (self._states.keys() | self._reward_names.keys()) - {record.run_id for record in served}:
            self._states.pop(run_id, None)
            self._reward_names.pop(run_id, None)
        for record in served:
            self._states[record.run_id] = TrainerState(record.progress.step, record.progress.max_steps)
            if record.run_id not in serving:
                serving[record.run_id] = asyncio.create_task(self._serve(record), name=f"rewards of {record.run_id}")

    async def _serve(self, record: RunRecord) -> None:
        with about(run_id=record.run_id):
            await self._score_run(record)

    async def _score_run(self, record: RunRecord) -> None:
        try:
            config = record.parsed_config()
            require_sendable(call_without_rows(config))
        except UserError as error:
            log.error("run %s is not scored: %s", record.run_id, error)  # noqa: TRY400  the message is enough
            await refuse(self._redis, "rewarder", self._replica_id, str(error), run_id=record.run_id)
            await self._stopping.wait()
            return
        await take_back(self._redis, "rewarder", self._replica_id, run_id=record.run_id)
        self._reward_names[record.run_id] = config.reward_funcs
        log.info("scoring run %s with %s", record.run_id, ", ".join(config.reward_funcs))
        try:
            await self._score_groups(RunKeys(record.run_id), config)
        except* StateLostError as errors:
            log.warning("run %s cannot be scored now: %s", record.run_id, errors.exceptions[0])
            # A server that was wiped has lost headrace's functions too, and later runs need them.
            await wait_until_back(self._redis, timeout_s=self._redis_patience_s)
            await self._pause()

    async def _score_groups(self, keys: RunKeys, config: RunConfig) -> None:
        consumer = StreamConsumer(
            self._redis,
            stream=keys.completions,
            consumer_group=REWARDERS,
            name=self._replica_id,
            leases=keys.leases(REWARDERS),
            dead=keys.dead,
        )
        functions = [WeightedFunction(*each) for each in zip(config.reward_funcs, config.weights(), strict=True)]
        slots = _Slots(self._max_inflight_groups)
        async with (
            lease(self._redis, leases=keys.leases(REWARDERS), consumer=self._replica_id),
            asyncio.TaskGroup() as groups,
        ):
            while not self._stopping.is_set():
                num_free = await slots.some()
                if self._stopping.is_set():
                    break
                for delivery in await consumer.read(count=min(num_free, _MAX_READ), block_s=_BLOCK_S):
                    task = groups.create_task(
                        self._score_delivery(delivery, keys, config, functions), name=f"score {delivery.group_id}"
                    )
                    slots.hold_until_done(task)

    async def _score_delivery(
        self, delivery: Delivery, keys: RunKeys, config: RunConfig, functions: Sequence[WeightedFunction]
    ) -> None:
        with self._metrics.groups_in_flight.track_inprogress(), about(group_id=delivery.group_id):
            async with settle(delivery):
                group = decode_completed_group(delivery.payload)
                require_place(group.prompt, run_id=keys.run_id, label=delivery.group_id)
                scored = await self._score_group(group, config, functions)
                is_first = await delivery.hand_off(keys.scored, keys.seen(keys.scored), encode(scored))
                self._metrics.groups.labels("scored" if is_first else "scored elsewhere").inc()
                return
        self._metrics.groups.labels("buried").inc()

    async def _score_group(
        self, group: CompletedGroup, config: RunConfig, functions: Sequence[WeightedFunction]
    ) -> ScoredGroup:
        state = self._states.get(group.prompt.run_id, TrainerState())
        outcomes = await self._scorer.score(
            call_for(
                group,
                state=state,
                max_completion_length=config.max_completion_length,
                chat_template_kwargs=config.chat_template_kwargs,
                reward_kwargs=config.reward_kwargs,
            ),
            functions,
            timeout_s=config.reward_timeout_s,
            lane=group.prompt.run_id,
            is_known_to_be_sendable=True,
        )
        return with_rewards(group, outcomes, by=self._replica_id)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._poll_every_s):
                await self._stopping.wait()
        except TimeoutError:
            pass


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
