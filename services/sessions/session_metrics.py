"""Prometheus metrics of the sessions service. One process has one registry."""

from contextlib import AbstractContextManager

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.sessions.recording.recording import Recording
from services.sessions.tool_rollout import ToolRollout
from shared.access.keyring import Keyring, keys_file_gauge


class SessionMetrics:
    """The Prometheus counters and gauges of groups, rollouts, turns, tool calls and workers. Made once per process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._replica = Gauge(
            "headrace_replica_info", "1; which replica answers at this address", ["replica_id"], registry=self.registry
        )
        self._keys_file_broken = keys_file_gauge(self.registry)
        self.groups = Counter("headrace_session_groups", "Groups by how they ended", ["end"], registry=self.registry)
        self.groups_in_flight = Gauge(
            "headrace_session_groups_in_flight", "Groups being played", registry=self.registry
        )
        self.environments = Gauge(
            "headrace_session_environments",
            "Rollouts that have an environment, or wait for one",
            registry=self.registry,
        )
        self._rollouts = Counter(
            "headrace_session_rollouts", "Rollouts by how they ended", ["end"], registry=self.registry
        )
        self._turns = Counter("headrace_session_turns", "Turns of ended rollouts", registry=self.registry)
        self._tool_calls = Counter(
            "headrace_session_tool_calls", "Tool calls of ended rollouts, by how they ended", ["end"],
            registry=self.registry,
        )  # fmt: skip
        self._worker_kills = Counter(
            "headrace_session_worker_kills",
            "Workers of tools and agents replaced, by reason",
            ["reason"],
            registry=self.registry,
        )
        self._waiting_for_worker = Gauge(
            "headrace_session_calls_waiting", "Calls of tools and agents that wait for a worker", registry=self.registry
        )
        self._forks = Counter(
            "headrace_session_forks",
            "Rows after the first of a rollout, begun because its history was rewritten",
            registry=self.registry,
        )
        self._drifted_tokens = Counter(
            "headrace_session_drifted_tokens",
            "Tokens that were rendered again because a client had rewritten what was sampled",
            registry=self.registry,
        )

    def worker_replaced(self, reason: str) -> None:
        """Count a worker of tools or agent programs that is replaced, by reason."""
        self._worker_kills.labels(reason).inc()

    def waiting_for_worker(self, lane: str) -> AbstractContextManager[object]:
        """Count a call as waiting while the block runs. ``lane``, a run id, is not a label: ids are unbounded."""
        return self._waiting_for_worker.track_inprogress()

    def name_replica(self, replica_id: str) -> None:
        """Publish the replica's name, which people recognise better than an address."""
        self._replica.labels(replica_id).set(1)

    def watch_keys(self, keyring: Keyring) -> None:
        """Publish, at each scrape, whether the file with the API keys is broken."""
        self._keys_file_broken.set_function(keyring.is_file_broken)

    def count(self, rollout: ToolRollout, recording: Recording) -> None:
        """Count an ended rollout with its turns, tool calls, additional rows and tokens that were rendered again."""
        self._rollouts.labels("lost" if rollout.lost else "played").inc()
        self._turns.inc(recording.num_turns)
        self._tool_calls.labels("answered").inc(rollout.num_calls - rollout.num_failed)
        self._tool_calls.labels("failed").inc(rollout.num_failed)
        self._forks.inc(recording.num_forks)
        self._drifted_tokens.inc(recording.num_drifted_tokens)
