"""What the rewarder counts, for Prometheus. One process, one registry."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


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
