"""Runs one reward loop for each running or paused run, and ends it when the run is over.

    running, paused runs --look, every poll_every_s--> begin or cancel a reward loop (reward_loop.py)
                                                   --> keep the run's progress, for reward functions that read it

A run is refused, with the reason in Redis, if its settings are not valid or its rewards' arguments cannot be sent to
workers. A run that waits in the queue has no groups and costs nothing.
"""

import asyncio
import logging

from services.rewarder.group_call import call_without_rows
from services.rewarder.reward_call import require_sendable
from services.rewarder.reward_loop import RewardLoop
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.scoring import Scorer
from services.rewarder.trainer_state import TrainerState
from shared.errors import StateLostError, UserError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.redis_readiness import wait_until_back
from shared.redis.run_record import RunRecord
from shared.redis.run_store import RunStore
from shared.redis.served_runs import ServedRuns
from shared.refusals import refuse, take_back
from shared.run_options.run_config import RunConfig
from shared.service.cancellation import raise_if_cancelled

log = logging.getLogger(__name__)


class RunFollower:
    """Runs a reward loop for every run that is running or paused, until ``stop`` is called.

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
        self._configs: dict[str, RunConfig] = {}

    def names_in_use(self) -> set[str]:
        """Return the names of all reward functions that the running and paused runs use."""
        return {name for config in self._configs.values() for name in config.reward_funcs}

    def stop(self) -> None:
        """Stop reading groups. ``run`` returns once the groups in flight are done or the drain time is over."""
        self._stopping.set()

    async def run(self) -> None:
        """Score all running and paused runs until ``stop`` is called.

        Raises:
            UnavailableError: Redis did not answer in time.
            ExceptionGroup: A reward loop failed, or Redis lost a run and did not come back. Holds that failure.
        """
        store = RunStore(self._redis)
        serving = ServedRuns(self._score_run, name="rewards of")
        try:
            while not self._stopping.is_set():
                served = await store.served()
                self._note(served)
                await serving.follow(served)
                self._forget_all_but(served)
                await self._pause()
            await serving.wait(timeout_s=self._drain_s)
        finally:
            await serving.cancel()

    def _note(self, served: list[RunRecord]) -> None:
        for record in served:
            config = self._configs.get(record.run_id)
            if config is not None:  # otherwise its rewards are not called yet
                self._states[record.run_id] = TrainerState.of(
                    config, record.progress, run_dir=record.run_dir, steps_before=record.steps_before
                )

    def _forget_all_but(self, served: list[RunRecord]) -> None:
        # Also for runs whose task ended by itself because Redis lost them.
        for run_id in (self._states.keys() | self._configs.keys()) - {record.run_id for record in served}:
            self._states.pop(run_id, None)
            self._configs.pop(run_id, None)

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
        self._configs[record.run_id] = config
        self._note([record])
        log.info("scoring run %s with %s", record.run_id, ", ".join(config.reward_funcs))
        try:
            await self._loop(record.run_id, config).run()
        except* StateLostError as errors:
            log.warning("run %s cannot be scored now: %s", record.run_id, errors.exceptions[0])
        else:
            return
        raise_if_cancelled()
        # A server that was wiped has lost headrace's functions too, and later runs need them.
        await wait_until_back(self._redis, timeout_s=self._redis_patience_s)
        await self._pause()

    def _loop(self, run_id: str, config: RunConfig) -> RewardLoop:
        return RewardLoop(
            self._redis,
            self._scorer,
            keys=RunKeys(run_id),
            config=config,
            replica_id=self._replica_id,
            max_inflight_groups=self._max_inflight_groups,
            metrics=self._metrics,
            progress=lambda: self._states.get(run_id, TrainerState()),
            stopping=self._stopping,
        )

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._poll_every_s):
                await self._stopping.wait()
        except TimeoutError:
            pass
