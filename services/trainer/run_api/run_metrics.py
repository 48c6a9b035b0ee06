"""Prometheus metrics of the trainer service, on a port of their own.

    headrace_runs{status}            headrace_rank_up  headrace_rank_restarts_total
    headrace_run_*{run_id}           the current run: step, policy version, groups, streams, generators, pauses
    headrace_training_*{run_id}      its newest training metrics: training_gauges.py

Only the current run has series, so that their number stays bounded however many runs there were.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from services.trainer.run_api.run_outputs import read_last_evaluation, read_last_metrics
from services.trainer.run_api.run_supervisor import RunSupervisor
from services.trainer.run_api.run_view import look_around
from services.trainer.run_api.training_gauges import TrainingGauges
from shared.errors import StateLostError, UnavailableError, UserError
from shared.redis_connection import Redis
from shared.run_store import RunRecord, RunStore

log = logging.getLogger(__name__)

_REFRESH_S = 5.0


class RunMetrics:
    """Gauges that are set again every few seconds."""

    def __init__(self, redis: Redis, *, store: RunStore, supervisor: RunSupervisor) -> None:
        self._redis = redis
        self._store = store
        self._supervisor = supervisor
        self.registry = CollectorRegistry()
        self._runs = self._gauge("headrace_runs", "Runs by status", "status")
        self._rank_up = self._gauge("headrace_rank_up", "1 while a training rank runs")
        self._restarts = self._gauge("headrace_rank_restarts_total", "Restarts of training ranks by this process")
        self._step = self._gauge("headrace_run_step", "Optimizer steps done", "run_id")
        self._version = self._gauge("headrace_run_policy_version", "Newest policy version", "run_id")
        self._groups = self._gauge("headrace_run_groups", "Prompt groups by outcome", "run_id", "outcome")
        self._pushes = self._gauge("headrace_run_pushes", "Weight pushes by outcome", "run_id", "outcome")
        self._probes_failed = self._gauge("headrace_run_probes_failed", "Generators taken out by the probe", "run_id")
        self._depth = self._gauge("headrace_run_stream_depth", "Groups waiting or in work", "run_id", "stream")
        self._generators = self._gauge("headrace_run_generators_alive", "Generators with a living lease", "run_id")
        self._paused = self._gauge(
            "headrace_run_paused", "1 while it is paused, by a user or its rewards", "run_id", "by"
        )
        self._paused_s = self._gauge("headrace_run_paused_seconds", "How long it was paused so far", "run_id")
        self._training = TrainingGauges()
        self.registry.register(self._training)
        self._of_the_current_run = (
            self._step, self._version, self._groups, self._pushes, self._probes_failed, self._depth, self._generators,
            self._paused, self._paused_s,
        )  # fmt: skip

    async def refresh_for_ever(self) -> None:
        """Keep the gauges fresh. While Redis is away they stay as they were; the supervisor judges that."""
        while True:
            try:
                await self.refresh()
            except (UnavailableError, StateLostError) as error:
                log.warning("metrics were not refreshed: %s", error)
            await asyncio.sleep(_REFRESH_S)

    async def refresh(self) -> None:
        """Set all gauges to what is true now."""
        self._rank_up.set(0 if self._supervisor.rank is None else 1)
        self._restarts.set(self._supervisor.num_restarts)
        records = [await self._store.get(run_id) for run_id in await self._store.list_ids()]
        counts = Counter(record.status for record in records if record is not None)
        for status in ("queued", "running", "paused", "finished", "stopped", "failed"):
            self._runs.labels(status).set(counts[status])
        for gauge in self._of_the_current_run:
            gauge.clear()
        current = await self._store.current_run()
        if current is None:
            self._training.clear()
        for record in records:
            if record is not None and record.run_id == current:
                await self._refresh_run(record)

    async def _refresh_run(self, record: RunRecord) -> None:
        run_id, progress = record.run_id, record.progress
        around = await look_around(self._redis, record, current_run=run_id)
        self._step.labels(run_id).set(progress.step)
        self._version.labels(run_id).set(progress.policy_version)
        dropped = sum(progress.groups_dropped.values())
        self._groups.labels(run_id, "admitted").set(progress.groups_admitted)
        self._groups.labels(run_id, "trained").set(progress.groups_trained)
        self._groups.labels(run_id, "in_flight").set(progress.groups_admitted - progress.groups_trained - dropped)
        for reason, number in progress.groups_dropped.items():
            self._groups.labels(run_id, f"dropped_{reason}").set(number)
        self._pushes.labels(run_id, "confirmed").set(progress.pushes_confirmed)
        self._pushes.labels(run_id, "failed").set(progress.pushes - progress.pushes_confirmed)
        self._probes_failed.labels(run_id).set(progress.probes_failed)
        for stream, depth in around.queues.model_dump().items():
            self._depth.labels(run_id, stream).set(depth)
        self._generators.labels(run_id).set(sum(generator.is_alive for generator in around.generators))
        for by in ("user", "rewards"):
            self._paused.labels(run_id, by).set(record.pause is not None and record.pause.by == by)
        self._paused_s.labels(run_id).set(progress.paused_s)
        # What is of the rollouts stands only in the line of the step that began their batch.
        num_lines = record.parsed_config().steps_per_batch()
        run_dir = Path(record.run_dir)
        newest = await asyncio.to_thread(read_last_evaluation, run_dir)
        for line in await asyncio.to_thread(read_last_metrics, run_dir, limit=num_lines):
            newest |= line
        self._training.show(run_id, newest)

    def _gauge(self, name: str, description: str, *labels: str) -> Gauge:
        return Gauge(name, description, labels, registry=self.registry)


@contextlib.contextmanager
def served(registry: CollectorRegistry, *, host: str, port: int) -> Generator[None]:
    """Serve /metrics while the body runs; port 0 serves nothing.

    Raises:
        UserError: The port is taken.
    """
    if port == 0:
        yield
        return
    try:
        server: Any
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise UserError(
            f"metrics cannot be served on {host}:{port}: {error.strerror}. Set HEADRACE_METRICS_PORT"
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
