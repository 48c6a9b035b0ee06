"""Reports on one run: its progress, each optimizer step with the rollouts it trained, and each evaluation.

    progress, once a second     --> the run's record, where the run API reads it
    steps, evaluations, notes   --> the run's log and its watchers, and the trackers of report_to

rollout metrics of the batch   on the line of its first step, as TRL logs them once per generation
staleness                      on every line, because it grows within a batch
rollout log                    in the first pass over a minibatch, because later passes train the same rollouts again
"""

import asyncio
import logging
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from services.trainer.checkpoints.best_checkpoint import BestCheckpoint
from services.trainer.fence import check_not_fenced
from services.trainer.groups.schedule import BatchShape, RunLength
from services.trainer.groups.staleness import staleness
from services.trainer.intake.evaluation import EvaluationResult, evaluation_line
from services.trainer.intake.intake import Intake
from services.trainer.loop.batch_trainer import TrainedStep
from services.trainer.loop.outflow import Outflow
from services.trainer.policy.training_core import TrainingCore
from services.trainer.run_context import RunContext
from services.trainer.telemetry.group_traces import GroupTraces
from services.trainer.telemetry.per_token_log import rollout_rows
from services.trainer.telemetry.reports import Reports
from services.trainer.telemetry.run_log import RunLog
from services.trainer.telemetry.step_metrics import (
    RecentRate,
    TrainedGroup,
    group_metrics,
    num_seen_tokens,
    rollout_metrics,
)
from shared.messages import Stamp
from shared.redis.redis_connection import patiently
from shared.redis.run_record import Progress, Waiting

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_LAST_TRACES_S = 5.0


class Reporting:
    """Reports a run's progress, steps and evaluations to its record in Redis, its log files and its trackers.

    Args:
        run: The run.
        core: Knows the policy version.
        intake: Counts groups and arrived tokens.
        outflow: Has the metrics of the last push and the last checkpoint.
        log: The run log to write to.
        trackers: The trackers to report to.
        traces: Traces of groups, which are closed with the trackers.
        seen_tokens: TRL's ``num_tokens`` up to the checkpoint that the run resumed from.
        length: Optimizer steps of the run.
        num_rows: Prompts in one pass over the data.
        best: The best checkpoint so far; None if the run does not look for it.
    """

    def __init__(
        self,
        run: RunContext,
        *,
        core: TrainingCore,
        intake: Intake,
        outflow: Outflow,
        log: RunLog,
        trackers: Reports,
        traces: GroupTraces,
        seen_tokens: int,
        length: RunLength,
        num_rows: int,
        best: BestCheckpoint | None = None,
    ) -> None:
        self.seen_tokens = seen_tokens
        self.log = log
        self.traces = traces
        self._run = run
        self._core = core
        self._intake = intake
        self._outflow = outflow
        self._trackers = trackers
        self._length = length
        self._num_rows = num_rows
        self._best = best
        self._model_step: int | None = None
        self._waiting = Waiting("work", "the first push")
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._arrivals = RecentRate()
        self._num_arrived_tokens = 0
        self._step_began_at = time.monotonic()
        self._waited_s = 0.0

    def waits_for(self, what: Waiting | str) -> None:
        """Set the reason for waiting that the next progress reports show; empty if the run does not wait."""
        self._waiting = Waiting("work", what) if isinstance(what, str) else what

    def leaves_model_of(self, step: int) -> None:
        """Set the step of the final model's weights, which the next progress reports have."""
        self._model_step = step

    async def write_progress_for_ever(self) -> None:
        """Write the run's progress about once a second."""
        while True:
            await self.write_progress()
            await asyncio.sleep(_EVERY_S)

    async def write_progress(self) -> None:
        """Write the run's progress to its record and to its watchers."""
        waiting = self._outflow.awaited_push() or self._waiting
        step, ledger, pushes = self._core.policy_version, self._intake.ledger, self._outflow.pushes
        num_groups = BatchShape.of(self._run.config).groups(num_steps=self._length.steps_before + step)
        progress = Progress(
            step=step,
            max_steps=self._length.total_steps,
            policy_version=step,
            waiting_for=waiting.says,
            waiting_kind=waiting.kind,
            groups_admitted=ledger.admitted,
            groups_trained=ledger.num_trained,
            groups_dropped=ledger.dropped_by_reason(),
            groups_scored=len(self._intake.scored.numbers()),
            num_generators=pushes.num_generators,
            pushes=pushes.num_pushes,
            pushes_confirmed=pushes.num_confirmed,
            probes_failed=pushes.num_probes_failed,
            num_left_out=pushes.num_left_out,
            left_out=pushes.left_out(),
            paused_s=self._intake.pause.total_s(),
            is_evaluating=self._is_evaluating(),
            is_ending=self._is_ending(),
            disk_full=self._run.room.missing,
            best=None if self._best is None else self._best.seen(),
            model_step=self._model_step,
            epoch=num_groups / self._num_rows,
            num_tokens=int(self.seen_tokens),
            updated_at_s=time.time(),
        )
        await self._run.store.write_progress(self._run.keys.run_id, progress)
        await self.log.event("progress", {"step": progress.step, "waiting_for": progress.waiting_for})

    def _is_evaluating(self) -> bool:
        """Return whether training waits for an evaluation, or only an evaluation is left."""
        return self._intake.evaluations.is_running and (self._is_ending() or self._best is not None)

    def _is_ending(self) -> bool:
        """Return whether no step is left to make: all are made, or the run was asked to stop, or it stops early."""
        stops_early = self._best is not None and self._best.stops_early
        return stops_early or self._intake.should_stop or not self._length.num_left(self._core.policy_version)

    def waited(self, waited_s: float) -> None:
        """Record ``waited_s`` seconds without training. A pause's time and tokens count in no duration or rate."""
        num_tokens = self._intake.scored.take_arrived_tokens()
        if self._intake.pause.by is not None:
            self._step_began_at += waited_s
        else:
            self._num_arrived_tokens += num_tokens
            self._waited_s += waited_s

    async def step(self, groups: Sequence[TrainedGroup], trained: TrainedStep) -> None:
        """Log the metrics of an optimizer step and, if due, its rollouts. Send the metrics to the trackers.

        Args:
            groups: The groups of the step's batch.
            trained: The step.

        Raises:
            FencedError: A newer incarnation owns the run.
        """
        # A trainer that was stopped for a while must not write into its successor's files.
        await check_not_fenced(self._run.redis, self._run.keys, self._run.incarnation)
        more = self._outflow.saver.metrics() | {"paused_s": self._intake.pause.total_s()}
        step = trained.policy_version + 1
        if trained.planned.is_first:
            self.seen_tokens += num_seen_tokens(groups)
        metrics = {"step": float(step), "at_s": time.time()}
        metrics |= self._of_rollouts(groups, trained) | trained.stats.metrics()
        metrics |= await self._of_pipeline(trained) | more
        await self.log.metrics(metrics)
        trains_new = trained.planned.new_groups_after_steps is not None
        new_groups = trained.planned.minibatch.groups if trains_new else ()
        await asyncio.to_thread(self._trackers.step, step, metrics, new_groups)
        for failure in self._trackers.take_failures():
            await self.log.event("log", {"message": failure})
        if self._logs_rollouts(trained):
            stamp = Stamp("trained", time.time(), self._run.replica_id)
            rows = rollout_rows(
                new_groups, step=step, policy_version=trained.policy_version, trained=stamp, per_token=trained.per_token
            )
            await self.log.rollouts(step, rows)

    async def evaluation(self, result: EvaluationResult) -> None:
        """Log the metrics and rollouts of a finished evaluation, and send the metrics to the trackers."""
        stamp = Stamp("evaluated", time.time(), self._run.replica_id)
        rows = rollout_rows(result.groups, step=result.step, policy_version=result.step, trained=stamp)
        await self.log.evaluation(evaluation_line(result), rows)
        await asyncio.to_thread(self._trackers.evaluation, result.step, result.metrics)

    async def note(self, message: str) -> None:
        """Log a warning, and send it to the run's watchers."""
        log.warning("%s", message)
        await self.log.event("log", {"message": message})

    def close(self, *, run_is_over: bool, timeout_s: float) -> None:
        """Send the last reports, within ``timeout_s``, and the last traces, within at most 5 seconds more."""
        self._trackers.close(run_is_over=run_is_over, timeout_s=timeout_s)
        self.traces.close(timeout_s=min(timeout_s, _LAST_TRACES_S))

    def _of_rollouts(self, groups: Sequence[TrainedGroup], trained: TrainedStep) -> dict[str, float]:
        if trained.planned.is_first:
            return rollout_metrics(groups, policy_version=trained.policy_version, config=self._run.config)
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
        waited_s, self._waited_s = self._waited_s, 0.0
        num_tokens = self._num_arrived_tokens + self._intake.scored.take_arrived_tokens()
        self._num_arrived_tokens = 0
        depths = await patiently(self._queue_depths, what="reading queue depths", timeout_s=60)
        return {
            "num_tokens": float(self.seen_tokens),
            "step_time": elapsed_s,
            "train_time": trained.train_s,
            "wait_time": waited_s,
            "throughput/generated_tokens_per_s": self._arrivals.add(num_tokens, elapsed_s=elapsed_s),
            "throughput/tokens_per_pass": trained.tokens_per_pass,
            "throughput/trained_tokens_per_s": trained.planned.minibatch.num_tokens / trained.train_s,
            **group_metrics(self._intake.ledger),
            **{f"queue/{name}": float(depth) for name, depth in depths.items()},
            "queue/ahead": float(self._intake.num_ahead),
            **self._outflow.pushes.metrics(),
            **memory_metrics(self._device),
            **self._trackers.metrics(),
        }

    def _logs_rollouts(self, trained: TrainedStep) -> bool:
        """Whether this step's rollouts are logged.

        They are if a multiple of ``log_rollouts_every_steps`` lies between this step and the next with new groups.
        """
        until, step = trained.planned.new_groups_after_steps, trained.policy_version + 1
        if until is None:
            return False
        every = self._run.config.log_rollouts_every_steps
        return (step + until - 1) // every > (step - 1) // every

    async def _queue_depths(self) -> dict[str, int]:
        streams = {
            "prompts": self._run.keys.prompts,
            "completions": self._run.keys.completions,
            "scored": self._run.keys.scored,
        }
        pipeline = self._run.redis.pipeline(transaction=False)
        for stream in streams.values():
            pipeline.xlen(stream)
        depths = dict(zip(streams, await pipeline.execute(), strict=True))
        num_waiting = min(depths["scored"], len(self._intake.scored.numbers()))
        return depths | {"scored": num_waiting, "settled": depths["scored"] - num_waiting}


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the present and the peak memory of this rank, on the GPU too if it has one. Resets the peak of the GPU."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    metrics = {
        # The kernel updates the two counters separately and late; use is never shown above the peak.
        "memory/rss_bytes": float(min(num_pages * os.sysconf("SC_PAGE_SIZE"), peak_bytes)),
        "memory/peak_rss_bytes": float(peak_bytes),
    }
    if device.type == "cuda":
        metrics["memory/device_bytes"] = float(torch.cuda.memory_allocated(device))
        metrics["memory/device_peak_bytes"] = float(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
    return metrics
