"""What the rewarder counts, for Prometheus. One process, one registry."""

import contextlib

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
RETRY_REASONS = ("connection", "429", "502", "503", "504")


class RewarderMetrics:
    """Made once by the entry point; ``function`` labels hold names that exist, so they are bounded."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.seconds = Histogram(
            "headrace_reward_seconds",
            "Time one reward function took for one group, queueing not included, by its most frequent outcome",
            ["function", "outcome"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.outcomes = Counter(
            "headrace_reward_outcomes",
            "Completions by what a function said",
            ["function", "outcome"],
            registry=self.registry,
        )
        self.groups = Counter("headrace_reward_groups", "Groups by how they left", ["end"], registry=self.registry)
        self.groups_in_flight = Gauge("headrace_reward_groups_in_flight", "Groups being scored", registry=self.registry)
        self.queued = Gauge("headrace_reward_queue_depth", "Calls waiting for a worker", registry=self.registry)
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
            "0 closed, 1 half-open: one request tries it, 2 open: it is left alone",
            ["endpoint"],
            registry=self.registry,
        )
        self.endpoint_retries = Counter(
            "headrace_reward_endpoint_retries",
            "Requests sent again, by what came of the try before: connection, 429, 502, 503 or 504",
            ["endpoint", "reason"],
            registry=self.registry,
        )

    def forget_endpoint(self, name: str) -> None:
        """Show an endpoint no more that was deleted."""
        for gauge in (self.endpoint_in_flight, self.endpoint_queued, self.endpoint_breaker):
            with contextlib.suppress(KeyError):
                gauge.remove(name)
        for reason in RETRY_REASONS:
            with contextlib.suppress(KeyError):
                self.endpoint_retries.remove(name, reason)
