"""Prometheus metrics of the trainer service, on a separate port.

    headrace_runs{status}            number of runs; headrace_rank_*: whether a training rank runs, and its restarts
    headrace_run_*{run_id}           the current run: step, policy version, groups, streams, replicas, pauses, disk
    headrace_training_*{run_id}      its newest training metrics: training_gauges.py
    headrace_redis_*                 whether Redis answers, how full it is, whether it writes to its disk
    headrace_keys_file_broken        whether the file with the API keys is broken: shared/access/keyring.py

Only the current run has series, so that their number stays bounded however many runs there were. All series of a run
are replaced at once, and keep their values if anything about the run cannot be read. Redis has no /metrics of its own,
and monitoring headrace should need no further exporter for failures that stop a run.
"""

import asyncio
import contextlib
import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Metric

from services.trainer.run_api.run_surroundings import look_around
from services.trainer.run_api.run_view import Surroundings, is_agentic
from services.trainer.run_api.training_gauges import TrainingGauges
from services.trainer.run_outputs import read_last_evaluation, read_last_metrics
from services.trainer.supervision.run_supervisor import RunSupervisor
from shared.access.keyring import Keyring, keys_file_gauge
from shared.errors import HeadraceError, UnavailableError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import TRANSIENT, Redis, patiently
from shared.redis.run_record import TERMINAL, RunRecord, Status
from shared.redis.run_store import RunStore

log = logging.getLogger(__name__)

_REFRESH_S, _FRESH_S = 5.0, 60.0
_PATIENCE_S = 10.0
DROPS_TO_WATCH = ("dead_letter", "stale", "unscorable")
"""Shown from the start with 0, so that the first drop is an increase and not a new series."""


class RunCounts:
    """Counts runs by status. The status of an ended run is read only once."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._ended: dict[str, Status | None] = {}

    async def refreshed(self) -> Counter[Status]:
        """Return the present number of runs by status."""
        lists = self._store.lists
        not_ended = {*await lists.queued(), *await lists.served()}  # a failed run may have been resumed
        every_id = await self._store.list_ids()
        found = await self._store.statuses([it for it in every_id if it in not_ended or it not in self._ended])
        known: dict[str, Status | None] = {run_id: found.get(run_id) or self._ended.get(run_id) for run_id in every_id}
        self._ended = {run_id: status for run_id, status in known.items() if status in TERMINAL}
        return Counter(status for status in known.values() if status is not None)


class WholeRegistry(CollectorRegistry):
    """A metrics registry whose updates are atomic with respect to scrapes.

    Scrapes run in a thread of their own. If a series were missing from a single scrape, because it was removed and not
    yet set again, every alert on it would start anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self._whole = threading.Lock()

    @contextlib.contextmanager
    def changing(self) -> Generator[None]:
        """Block scrapes while the body changes series. The body must not await, because scrapes wait for its end."""
        with self._whole:
            yield

    def collect(self) -> Iterable[Metric]:
        """Return all metrics as they are before or after a change, never in between."""
        with self._whole:
            return list(super().collect())


class RedisGauges:
    """Gauges that show whether Redis answers, how full it is, and whether it writes to its disk.

    While Redis is away, ``headrace_redis_up`` is 0 and the other gauges keep their values.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._up = Gauge("headrace_redis_up", "1 while Redis answers the trainer", registry=registry)
        self._used = Gauge("headrace_redis_memory_used_bytes", "Memory that Redis uses", registry=registry)
        self._most = Gauge(
            "headrace_redis_memory_max_bytes",
            "maxmemory: above it writes are refused; 0 means no limit",
            registry=registry,
        )
        self._aof = Gauge(
            "headrace_redis_aof_writing", "1 while Redis appends to its file; 0 if off or failing", registry=registry
        )

    async def refresh(self, redis: Redis) -> None:
        """Ask Redis and set the gauges; bounded by the client's timeout.

        Raises:
            UnavailableError: Redis does not answer.
        """
        try:
            memory, persistence = await redis.info("memory"), await redis.info("persistence")
        except TRANSIENT as error:
            self._up.set(0)
            raise UnavailableError(f"Redis does not answer: {error}") from error
        self._up.set(1)
        self._used.set(int(memory["used_memory"]))
        self._most.set(int(memory.get("maxmemory", 0)))
        is_writing = bool(persistence.get("aof_enabled")) and persistence.get("aof_last_write_status") == "ok"
        self._aof.set(is_writing)


class RunMetrics:
    """The trainer's gauges of runs, ranks, Redis and the current run, refreshed every five seconds."""

    def __init__(self, redis: Redis, *, store: RunStore, supervisor: RunSupervisor) -> None:
        self._redis = redis
        self._store = store
        self._supervisor = supervisor
        self._counts = RunCounts(store)
        self.registry = WholeRegistry()
        self._keys_file_broken = keys_file_gauge(self.registry)
        self._runs = self._gauge("headrace_runs", "Runs by status", "status")
        self._rank_up = self._gauge("headrace_rank_up", "1 while a training rank runs")
        self._restarts = self._gauge("headrace_rank_restarts_total", "Restarts of training ranks by this process")
        self._starts = self._gauge("headrace_run_rank_starts", "Starts of its training rank, for any reason", "run_id")
        self._step = self._gauge("headrace_run_step", "Optimizer steps done", "run_id")
        self._max_steps = self._gauge("headrace_run_max_steps", "Optimizer steps of the whole run", "run_id")
        self._version = self._gauge("headrace_run_policy_version", "Newest policy version", "run_id")
        self._groups = self._gauge("headrace_run_groups", "Prompt groups by outcome", "run_id", "outcome")
        self._pushes = self._gauge("headrace_run_pushes", "Weight pushes by outcome", "run_id", "outcome")
        self._probes_failed = self._gauge("headrace_run_probes_failed", "Generators removed by the probe", "run_id")
        self._depth = self._gauge("headrace_run_stream_depth", "Groups waiting or being worked on", "run_id", "stream")
        self._max_staleness = self._gauge(
            "headrace_run_max_staleness_steps", "Staleness that no trained group exceeds", "run_id"
        )
        self._generators = self._gauge("headrace_run_generators_alive", "Generators with a live lease", "run_id")
        self._serving = self._gauge("headrace_run_generators_serving", "Live generators that serve the run", "run_id")
        self._left_out = self._gauge(
            "headrace_run_generators_left_out", "Generators that did not get the policy version pushed last", "run_id"
        )
        self._rewarders = self._gauge("headrace_run_rewarders_alive", "Rewarders with a live lease", "run_id")
        self._sessions = self._gauge(
            "headrace_run_sessions_alive", "Sessions replicas with a live lease, for a run with tools", "run_id"
        )
        self._paused = self._gauge(
            "headrace_run_paused", "1 while it is paused, by a user or its rewards", "run_id", "by"
        )
        self._paused_s = self._gauge("headrace_run_paused_seconds", "How long it was paused so far", "run_id")
        self._evaluating = self._gauge(
            "headrace_run_evaluating", "1 while it makes no step because of an evaluation", "run_id"
        )
        self._ending = self._gauge(
            "headrace_run_ending", "1 while it has no step left to make, but has not ended", "run_id"
        )
        self._disk_free = self._gauge(
            "headrace_run_disk_free_bytes", "Free space on the disk of its directory", "run_id"
        )
        self._disk_size = self._gauge("headrace_run_disk_size_bytes", "Size of the disk of its directory", "run_id")
        self._redis_gauges = RedisGauges(self.registry)
        self._training = TrainingGauges()
        self.registry.register(self._training)
        self._of_the_current_run = (
            self._starts, self._step, self._max_steps, self._version, self._groups, self._pushes, self._probes_failed,
            self._depth, self._max_staleness, self._generators, self._serving, self._left_out, self._rewarders,
            self._sessions, self._paused, self._paused_s, self._evaluating, self._ending, self._disk_free,
            self._disk_size,
        )  # fmt: skip

    def watch_keys(self, keyring: Keyring) -> None:
        """Show, at each scrape, whether the file with the API keys is broken."""
        self._keys_file_broken.set_function(keyring.is_file_broken)

    async def watch_redis_for_ever(self) -> None:
        """Refresh only the gauges of Redis every five seconds. Used while the service waits for Redis."""
        while True:
            with contextlib.suppress(UnavailableError):  # the gauges show it
                await self._redis_gauges.refresh(self._redis)
            await asyncio.sleep(_REFRESH_S)

    async def refresh_for_ever(self) -> None:
        """Refresh all gauges every five seconds. If something cannot be read, log it, and keep the earlier values."""
        while True:
            try:
                await self.refresh()
            except (HeadraceError, OSError) as error:
                log.warning("metrics were not refreshed: %s", error)
            await asyncio.sleep(_REFRESH_S)

    async def refresh(self) -> None:
        """Set all gauges from Redis, the supervisor and the current run's files. Raises HeadraceError or OSError."""
        await self._redis_gauges.refresh(self._redis)
        self._rank_up.set(0 if self._supervisor.keeper.rank is None else 1)
        self._restarts.set(self._supervisor.keeper.num_restarts)
        counts = await self._counts.refreshed()
        for status in ("queued", "running", "paused", "finished", "stopped", "failed"):
            self._runs.labels(status).set(counts[status])
        current = await self._store.current_run()
        record = None if current is None else await self._store.get(current)
        if record is None:
            with self.registry.changing():
                self._forget_the_run()
            return
        around = await look_around(self._redis, record, current_run=current)
        newest = await asyncio.to_thread(_newest_metrics, record)
        disk = await asyncio.to_thread(_disk_of, Path(record.run_dir))
        epoch = RunKeys(record.run_id).epoch
        num_starts = await patiently(
            lambda: self._redis.get(epoch), what="reading the starts of the run's rank", timeout_s=_PATIENCE_S
        )
        config = record.parsed_config()
        with self.registry.changing():
            self._forget_the_run()
            self._show_progress(record)
            self._starts.labels(record.run_id).set(int(num_starts or 0))
            self._max_staleness.labels(record.run_id).set(config.max_staleness)
            self._show_surroundings(record, around)
            if is_agentic(record):
                self._sessions.labels(record.run_id).set(around.num_sessions)
            if disk is not None:
                self._disk_free.labels(record.run_id).set(disk[0])
                self._disk_size.labels(record.run_id).set(disk[1])
            self._training.show(record.run_id, newest)

    def _forget_the_run(self) -> None:
        for gauge in self._of_the_current_run:
            gauge.clear()
        self._training.clear()

    def _show_progress(self, record: RunRecord) -> None:
        run_id, progress = record.run_id, record.progress
        self._step.labels(run_id).set(progress.step)
        self._max_steps.labels(run_id).set(progress.max_steps)
        self._version.labels(run_id).set(progress.policy_version)
        dropped = sum(progress.groups_dropped.values())
        self._groups.labels(run_id, "admitted").set(progress.groups_admitted)
        self._groups.labels(run_id, "trained").set(progress.groups_trained)
        self._groups.labels(run_id, "in_flight").set(progress.groups_admitted - progress.groups_trained - dropped)
        for reason, number in (dict.fromkeys(DROPS_TO_WATCH, 0) | progress.groups_dropped).items():
            self._groups.labels(run_id, f"dropped_{reason}").set(number)
        self._pushes.labels(run_id, "confirmed").set(progress.pushes_confirmed)
        self._pushes.labels(run_id, "failed").set(progress.pushes - progress.pushes_confirmed)
        self._probes_failed.labels(run_id).set(progress.probes_failed)
        self._left_out.labels(run_id).set(progress.num_left_out)
        for by in ("user", "rewards"):
            self._paused.labels(run_id, by).set(record.pause is not None and record.pause.by == by)
        self._paused_s.labels(run_id).set(progress.paused_s)
        is_fresh = time.time() - progress.updated_at_s < _FRESH_S  # the last word of a rank that hangs does not count
        self._evaluating.labels(run_id).set(progress.is_evaluating and is_fresh)
        self._ending.labels(run_id).set(progress.is_ending and is_fresh)

    def _show_surroundings(self, record: RunRecord, around: Surroundings) -> None:
        for stream, depth in around.queues.model_dump().items():
            self._depth.labels(record.run_id, stream).set(depth)
        self._generators.labels(record.run_id).set(sum(generator.is_alive for generator in around.generators))
        self._serving.labels(record.run_id).set(sum(generator.serves for generator in around.generators))
        self._rewarders.labels(record.run_id).set(around.num_rewarders)

    def _gauge(self, name: str, description: str, *labels: str) -> Gauge:
        return Gauge(name, description, labels, registry=self.registry)


def _newest_metrics(record: RunRecord) -> dict[str, Any]:
    """Return the newest value of every metric. Only the line of a batch's first step has metrics of its rollouts."""
    run_dir = Path(record.run_dir)
    newest = read_last_evaluation(run_dir)
    for line in read_last_metrics(run_dir, limit=record.parsed_config().steps_per_batch()):
        newest |= line
    return newest


def _disk_of(run_dir: Path) -> tuple[int, int] | None:
    """Return the free and total bytes of the disk, or None if the directory does not exist yet."""
    try:
        usage = shutil.disk_usage(run_dir)
    except OSError:
        return None
    return usage.free, usage.total
