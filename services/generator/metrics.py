"""Prometheus metrics of a generator replica."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.generator.inflight_window import EngineLoad
from shared.access.keyring import Keyring, keys_file_gauge


class GeneratorMetrics:
    """Metrics of one process, in a registry of their own, without vLLM's metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._replica = Gauge(
            "headrace_replica_info", "1; which replica answers at this address", ["replica_id"], registry=self.registry
        )
        self._keys_file_broken = keys_file_gauge(self.registry)
        self.tokens = Counter("headrace_generated_tokens", "Tokens sampled for prompt groups", registry=self.registry)
        self.published = Counter("headrace_groups_generated", "Groups published whole", registry=self.registry)
        self.duplicates = Counter(
            "headrace_groups_generated_twice",
            "Groups that another replica had already published",
            registry=self.registry,
        )
        self.inflight = Gauge("headrace_groups_in_flight", "Groups in the engine", registry=self.registry)
        self.window = Gauge("headrace_inflight_window", "Groups that may be in the engine", registry=self.registry)
        self.kv_usage = Gauge(
            "headrace_kv_cache_usage", "Share of the engine's KV cache in use, from 0 to 1", registry=self.registry
        )
        self.running = Gauge("headrace_requests_running", "Completions being decoded", registry=self.registry)
        self.waiting = Gauge(
            "headrace_requests_waiting", "Completions in the engine that are not being decoded", registry=self.registry
        )
        self.preempted = Counter(
            "headrace_requests_preempted",
            "Completions whose KV cache was evicted for lack of room, and recomputed",
            registry=self.registry,
        )
        self.recomputed = Counter(
            "headrace_requests_recomputed",
            "Completions whose KV cache was recomputed with the weights of a push",
            registry=self.registry,
        )
        self.policy_version = Gauge(
            "headrace_generator_policy_version", "Policy version held; -1 if none is", registry=self.registry
        )
        self.decoding_is_paused = Gauge(
            "headrace_generator_held", "1 while decoding is held for a push", registry=self.registry
        )

    def name_replica(self, replica_id: str) -> None:
        """Export the replica's id with the metrics, because people do not recognise a replica by its address."""
        self._replica.labels(replica_id).set(1)

    def watch_keys(self, keyring: Keyring) -> None:
        """Export whether the file of API keys is unreadable; it is checked at every scrape."""
        self._keys_file_broken.set_function(keyring.is_file_broken)

    def show_load(self, load: EngineLoad, *, window: int) -> None:
        """Export the engine's load since the last report, and ``window``: how many groups may be in flight."""
        self.window.set(window)
        self.kv_usage.set(load.kv_usage)
        self.running.set(load.num_running)
        self.waiting.set(load.num_waiting)
        self.preempted.inc(load.num_preempted)
        self.recomputed.inc(load.num_recomputed)
