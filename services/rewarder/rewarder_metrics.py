"""Prometheus metrics of the rewarder, and the running mean and deviation of each function's rewards."""

import contextlib
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.access.keyring import Keyring, keys_file_gauge
from shared.messages import CallOutcome

HTTP_LANE, SELF_TEST_LANE = "http", "self-test"
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
WINDOW = 1000
RETRY_REASONS = ("connection", "429", "502", "503", "504")


class RewarderMetrics:
    """The rewarder's Prometheus metrics, in a registry of their own if none is given.

    The label ``function`` is the name of an existing function or ``unknown``, so its number of values is bounded.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._drifts: dict[str, ValueDrift] = {}
        self._replica = Gauge(
            "headrace_replica_info", "1; which replica answers at this address", ["replica_id"], registry=self.registry
        )
        self._keys_file_broken = keys_file_gauge(self.registry)
        self.seconds = Histogram(
            "headrace_reward_seconds",
            "Time one reward function took for one group, without the wait for its turn: 0 for an overload, "
            "the deadline for a timeout. By its most frequent outcome",
            ["function", "outcome"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.outcomes = Counter(
            "headrace_reward_outcomes",
            "Completions by a function's outcome",
            ["function", "outcome"],
            registry=self.registry,
        )
        self.groups = Counter("headrace_reward_groups", "Groups by how they ended", ["end"], registry=self.registry)
        self.groups_in_flight = Gauge("headrace_reward_groups_in_flight", "Groups being scored", registry=self.registry)
        self.in_flight = Gauge(
            "headrace_reward_calls_in_flight",
            "Calls of a function that have begun and not ended, waiting included",
            ["function"],
            registry=self.registry,
        )
        self.queued = Gauge(
            "headrace_reward_queue_depth",
            "Calls that wait for a worker or for a function's limits, and requests that wait for their turn, by lane",
            ["queue", "lane"],
            registry=self.registry,
        )
        for queue, lane in (("workers", "run"), ("workers", "http"), ("requests", "http")):
            self.queued.labels(queue, lane)  # 0 from the start
        self.value_mean = Gauge(
            "headrace_reward_value_mean",
            "Mean of a function's values over about the last thousand completions",
            ["function"],
            registry=self.registry,
        )
        self.value_std = Gauge(
            "headrace_reward_value_std",
            "Standard deviation of a function's values over about the last thousand completions",
            ["function"],
            registry=self.registry,
        )
        self.worker_kills = Counter(
            "headrace_reward_worker_kills", "Workers replaced, by reason", ["reason"], registry=self.registry
        )
        self.endpoint_in_flight = Gauge(
            "headrace_reward_endpoint_requests_in_flight", "Requests under way", ["endpoint"], registry=self.registry
        )
        self.endpoint_queued = Gauge(
            "headrace_reward_endpoint_requests_queued",
            "Requests that wait for their turn",
            ["endpoint"],
            registry=self.registry,
        )
        self.endpoint_breaker = Gauge(
            "headrace_reward_endpoint_breaker_state",
            "The circuit breaker of runs. 0 closed, 1 half-open: one request tests it, 2 open: runs do not call it",
            ["endpoint"],
            registry=self.registry,
        )
        self.endpoint_retries = Counter(
            "headrace_reward_endpoint_retries",
            "Requests sent again, by the result of the previous try: connection, 429, 502, 503 or 504",
            ["endpoint", "reason"],
            registry=self.registry,
        )

    def worker_replaced(self, reason: str) -> None:
        """Count a replaced worker: ``died``, ``renewed``, ``cancelled``, or the outcome of its failed call."""
        self.worker_kills.labels(reason).inc()

    def waiting_for_worker(self, lane: str) -> AbstractContextManager[object]:
        """Count a call as waiting for a reward worker while the ``with`` block runs."""
        return self.queued.labels("workers", lane_kind(lane)).track_inprogress()

    def observe_values(self, function: str, values: Iterable[float]) -> None:
        """Add new rewards of a function to the running mean and standard deviation of its values."""
        drift = self._drifts.setdefault(function, ValueDrift())
        for value in values:
            drift.add(value)
        self.value_mean.labels(function).set(drift.mean)
        self.value_std.labels(function).set(drift.std)

    def name_replica(self, replica_id: str) -> None:
        """Publish the replica's name as a metric, because people recognise a name better than an address."""
        self._replica.labels(replica_id).set(1)

    def watch_keys(self, keyring: Keyring) -> None:
        """Publish a metric that is 1 while the file with the API keys cannot be read. It is computed at each scrape."""
        self._keys_file_broken.set_function(keyring.is_file_broken)

    def forget_endpoint(self, name: str) -> None:
        """Remove the metrics of a deleted endpoint."""
        self.forget_function(name)
        for metric in (self.endpoint_in_flight, self.endpoint_queued, self.endpoint_breaker):
            _remove(metric, name)
        for reason in RETRY_REASONS:
            _remove(self.endpoint_retries, name, reason)

    def forget_function(self, name: str) -> None:
        """Remove the metrics of a function that is no longer known."""
        self._drifts.pop(name, None)
        for metric in (self.in_flight, self.value_mean, self.value_std):
            _remove(metric, name)
        for outcome in get_args(CallOutcome):
            _remove(self.outcomes, name, outcome)
            _remove(self.seconds, name, outcome)


def _remove(metric: Counter | Gauge | Histogram, *labels: str) -> None:
    with contextlib.suppress(KeyError):
        metric.remove(*labels)


def lane_kind(lane: str) -> str:
    """Return the metrics label of a lane: ``run``, ``http`` or ``self-test``.

    A lane is the queue of one run, named by the run's id, or the queue of HTTP requests or of the self-test. The number
    of run ids is not bounded, so they cannot be labels.
    """
    return lane if lane in (HTTP_LANE, SELF_TEST_LANE) else "run"


class ValueDrift:
    """Running mean and standard deviation of one function's values, to make a drifting reward visible.

    They are exact over the first 1,000 values (``WINDOW``). After that, each new value has a weight of ``1 / WINDOW``,
    and older values fade away (D. H. D. West, 1979, with the weights of an exponential window).
    """

    def __init__(self) -> None:
        self._count = 0
        self.mean = 0.0
        self._variance = 0.0

    def add(self, value: float) -> None:
        """Add one finite value to the mean and the standard deviation."""
        self._count = min(WINDOW, self._count + 1)
        distance = value - self.mean
        step = distance / self._count
        self.mean += step
        self._variance = (1.0 - 1.0 / self._count) * (self._variance + distance * step)
        if not math.isfinite(self._variance):  # overflow by values near the largest float: start again
            self._count, self.mean, self._variance = 0, 0.0, 0.0

    @property
    def std(self) -> float:
        """The population standard deviation, with the same weights as the mean."""
        return math.sqrt(self._variance)
