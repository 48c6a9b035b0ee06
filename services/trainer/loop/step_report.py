"""Logs each optimizer step: its line of metrics, and the rollouts it trained.

rollout metrics of the batch   on the line of its first step, as TRL logs them once per generation
staleness                      on every line, because it grows within a batch
rollout log                    in the first pass over a minibatch, because later passes train the same rollouts again
"""

import asyncio
import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from services.trainer.groups.ledger import Ledger
from services.trainer.groups.staleness import staleness
from services.trainer.loop.batch_trainer import TrainedStep
from services.trainer.loop.evaluation import EvaluationResult, evaluation_line
from services.trainer.loop.push_schedule import PushSchedule
from services.trainer.loop.scored_groups import ScoredGroups
from services.trainer.telemetry.per_token_log import rollout_rows
from services.trainer.telemetry.recent_rate import RecentRate
from services.trainer.telemetry.reports import Reports
from services.trainer.telemetry.run_log import RunLog
from services.trainer.telemetry.step_memory import memory_metrics
from services.trainer.telemetry.step_metrics import TrainedGroup, group_metrics, num_seen_tokens, rollout_metrics
from shared.messages import Stamp
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis, patiently
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)


class StepReport:
    """The reports of one run's steps.

    Args:
        redis: Client of redis_connection.py.
        keys: Keys of the run.
        config: The run's config.
        ledger: Counts every group's outcome.
        scored: Counts arrived tokens.
        pushes: Has the metrics of the last push.
        log: The run log to write to.
        reports: The trackers to report to.
        replica_id: This trainer's id, for the stamps.
        seen_tokens: TRL's num_tokens up to the checkpoint that was resumed from.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        keys: RunKeys,
        config: RunConfig,
        ledger: Ledger,
        scored: ScoredGroups,
        pushes: PushSchedule,
        log: RunLog,
        reports: Reports,
        replica_id: str,
        seen_tokens: int,
    ) -> None:
        self.seen_tokens = seen_tokens
        self._redis = redis
        self._keys = keys
        self._config = config
        self._ledger = ledger
        self._scored = scored
        self._pushes = pushes
        self._log = log
        self._reports = reports
        self._replica_id = replica_id
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._arrivals = RecentRate()
        self._num_arrived_tokens = 0
        self._step_began_at = time.monotonic()

    def waited(self, waited_s: float, *, is_paused: bool) -> None:
        """Record time without training. A pause, and tokens that arrive in it, count in no duration and no rate."""
        num_tokens = self._scored.take_arrived_tokens()
        if is_paused:
            self._step_began_at += waited_s
        else:
            self._num_arrived_tokens += num_tokens

    async def step(self, groups: Sequence[TrainedGroup], trained: TrainedStep, more: dict[str, float]) -> None:
        """Log a step.

        Args:
            groups: The groups of the step's batch.
            trained: The step.
            more: Further metrics to log.
        """
        step = trained.policy_version + 1
        if trained.planned.is_first:
            self.seen_tokens += num_seen_tokens(groups)
        metrics = {"step": float(step), "at_s": time.time()}
        metrics |= self._of_rollouts(groups, trained) | trained.stats.metrics()
        metrics |= await self._of_pipeline(trained) | more
        await self._log.metrics(metrics)
        trains_new = trained.planned.new_groups_after_steps is not None
        new_groups = trained.planned.minibatch.groups if trains_new else ()
        await asyncio.to_thread(self._reports.step, step, metrics, new_groups)
        for failure in self._reports.take_failures():
            await self._log.event("log", {"message": failure})
        if self._logs_rollouts(trained):
            stamp = Stamp("trained", time.time(), self._replica_id)
            rows = rollout_rows(
                new_groups, step=step, policy_version=trained.policy_version, trained=stamp, per_token=trained.per_token
            )
            await self._log.rollouts(step, rows)

    async def evaluation(self, result: EvaluationResult) -> None:
        """Log an evaluation."""
        stamp = Stamp("evaluated", time.time(), self._replica_id)
        rows = rollout_rows(result.groups, step=result.step, policy_version=result.step, trained=stamp)
        await self._log.evaluation(evaluation_line(result), rows)
        await asyncio.to_thread(self._reports.evaluation, result.step, result.metrics)

    async def note(self, message: str) -> None:
        """Log a warning, and send it to the run's watchers."""
        log.warning("%s", message)
        await self._log.event("log", {"message": message})

    def _of_rollouts(self, groups: Sequence[TrainedGroup], trained: TrainedStep) -> dict[str, float]:
        if trained.planned.is_first:
            return rollout_metrics(groups, policy_version=trained.policy_version, config=self._config)
        ages = [
            staleness(policy_version=trained.policy_version, oldest_policy_version=group.waiting.oldest_policy_version)
            for group in trained.planned.minibatch.groups
        ]
        return {
            "staleness/min": float(min(ages)),
            "staleness/mean": float(np.mean(ages)),
            "staleness/max": float(max(ages)),
        }

    async def _of_pipeline(self, trained: TrainedStep) -> dict[str, float]:
        now = time.monotonic()
        elapsed_s, self._step_began_at = now - self._step_began_at, now
        num_tokens = self._num_arrived_tokens + self._scored.take_arrived_tokens()
        self._num_arrived_tokens = 0
        depths = await patiently(self._queue_depths, what="reading queue depths", timeout_s=60)
        return {
            "num_tokens": float(self.seen_tokens),
            "step_time": elapsed_s,
            "train_time": trained.train_s,
            "throughput/generated_tokens_per_s": self._arrivals.add(num_tokens, elapsed_s=elapsed_s),
            "throughput/tokens_per_pass": trained.tokens_per_pass,
            "throughput/trained_tokens_per_s": trained.planned.minibatch.num_tokens / trained.train_s,
            **group_metrics(self._ledger),
            **{f"queue/{name}": float(depth) for name, depth in depths.items()},
            **self._pushes.metrics(),
            **memory_metrics(self._device),
            **self._reports.metrics(),
        }

    def _logs_rollouts(self, trained: TrainedStep) -> bool:
        """Whether a multiple of ``log_rollouts_every_steps`` lies between this step and the next with new groups."""
        until, step = trained.planned.new_groups_after_steps, trained.policy_version + 1
        if until is None:
            return False
        every = self._config.log_rollouts_every_steps
        return (step + until - 1) // every > (step - 1) // every

    async def _queue_depths(self) -> dict[str, int]:
        streams = {"prompts": self._keys.prompts, "completions": self._keys.completions, "scored": self._keys.scored}
        return {name: int(await self._redis.xlen(stream)) for name, stream in streams.items()}
