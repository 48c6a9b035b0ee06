"""Names of all Redis keys of headrace.

    headrace:runs                      sorted set: run id by creation time
    headrace:runs:queued               sorted set: runs that wait for their turn (run_lists.py)
    headrace:runs:served               sorted set: runs that are running or paused
    headrace:runs:by_id                sorted set: run ids as text (run_index.py)
    headrace:runs:by_name              sorted set: NAME/RUN as text
    headrace:current_run               the run the generator fleet serves now
    headrace:fleet                     hash: every generator replica, with or without a run -> address
    headrace:leases:fleet              sorted set: these replicas by lease expiry (ms, server clock)
    headrace:submit:HASH               result of the submit with that Idempotency-Key; expires
    headrace:refusals                  hash: replica -> why it ended before it followed any run; expires
    headrace:reward_endpoints          hash: name -> specification of a reward endpoint (services/rewarder/endpoints)
    headrace:{RUN}:run                 hash: config, status, desired, num_resumes, max_steps, reason, pause, progress
    headrace:{RUN}:epoch               counter: trainer incarnations; only rises
    headrace:{RUN}:prompts             stream    read by consumer group "generators"
    headrace:{RUN}:completions         stream    read by consumer group "rewarders"
    headrace:{RUN}:scored              stream    read by consumer group "trainers"
    headrace:{RUN}:dead                stream of dead letters
    headrace:{RUN}:seen:STREAM         set: group ids that entered that stream and are not yet acked or withdrawn; gone
                                       once the run has finished or was stopped
    headrace:{RUN}:leases:CONSUMERS    sorted set: consumer by lease expiry (ms, server clock)
    headrace:{RUN}:takers              sorted set: generators that share the prompts, by expiry (ms, server clock)
    headrace:{RUN}:generators          hash: replica id -> address, and its work before it serves the run
    headrace:{RUN}:refusals            hash: replica -> why it cannot serve this run
    headrace:{RUN}:started             hash: group id -> weights with which its sampling began (lineage.py)
    headrace:{RUN}:sessions:GROUP      hash: "ROLLOUT/ENTRY", both numbers -> turn or tool result of a group's sessions;
                                       exists from the group's start (it is in `started`) until its hand-off or burial,
                                       or until the run has finished or was stopped
    headrace:{RUN}:required_version    the oldest weights with which a generator may take prompts (lineage.py)
    headrace:{RUN}:events              stream of telemetry for watchers; trimmed, never authoritative

The run id is the hash tag, so that all keys of a run are on one node and one function call may use all of them.
"""

from dataclasses import dataclass

RUNS = "headrace:runs"
QUEUED_RUNS = "headrace:runs:queued"
SERVED_RUNS = "headrace:runs:served"
RUNS_BY_ID = "headrace:runs:by_id"
RUNS_BY_NAME = "headrace:runs:by_name"
CURRENT_RUN = "headrace:current_run"
SUBMIT = "headrace:submit"
FLEET = "headrace:fleet"
FLEET_LEASES = "headrace:leases:fleet"
REFUSALS = "headrace:refusals"
REWARD_ENDPOINTS = "headrace:reward_endpoints"

GENERATORS = "generators"
REWARDERS = "rewarders"
TRAINERS = "trainers"


@dataclass(frozen=True)
class RunKeys:
    """The names of one run's Redis keys."""

    run_id: str

    def _key(self, name: str) -> str:
        return f"headrace:{{{self.run_id}}}:{name}"

    @property
    def run(self) -> str:
        """Hash with the run's record."""
        return self._key("run")

    @property
    def epoch(self) -> str:
        """Counter of trainer incarnations; writes of older incarnations are refused."""
        return self._key("epoch")

    @property
    def prompts(self) -> str:
        """Stream of prompt groups, which generators read."""
        return self._key("prompts")

    @property
    def completions(self) -> str:
        """Stream of completed groups, which rewarders read."""
        return self._key("completions")

    @property
    def scored(self) -> str:
        """Stream of scored groups, which the trainer reads."""
        return self._key("scored")

    @property
    def dead(self) -> str:
        """Stream of dead letters."""
        return self._key("dead")

    def seen(self, stream: str) -> str:
        """Set of the group ids that entered ``stream`` (a key of this run) and are not yet acked or withdrawn."""
        return self._key(f"seen:{stream.rsplit(':', 1)[-1]}")

    def leases(self, consumer_group: str) -> str:
        """Sorted set of the consumers in one consumer group, by lease expiry."""
        return self._key(f"leases:{consumer_group}")

    @property
    def takers(self) -> str:
        """Sorted set of the generators that share the prompts (services/generator/fair_share.py)."""
        return self._key("takers")

    @property
    def generators(self) -> str:
        """Hash of generator replica id to its Registration."""
        return self._key("generators")

    @property
    def refusals(self) -> str:
        """Hash of replica to the reason why it cannot serve this run."""
        return self._key("refusals")

    @property
    def started(self) -> str:
        """Hash of group id to the LineageVersion with which its sampling began."""
        return self._key("started")

    def sessions(self, group_id: str) -> str:
        """Hash of the turns and tool results recorded in one group's sessions (services/sessions/session_store.py)."""
        return self._key(f"sessions:{group_id}")

    @property
    def required_version(self) -> str:
        """The oldest weights (LineageVersion) with which a generator may take prompts."""
        return self._key("required_version")

    @property
    def events(self) -> str:
        """Stream of telemetry for clients that watch the run."""
        return self._key("events")

    def consumer_groups(self) -> tuple[tuple[str, str], ...]:
        """Return the (stream, consumer group) pairs that are made when the run is created, and at no other time."""
        return ((self.prompts, GENERATORS), (self.completions, REWARDERS), (self.scored, TRAINERS))

    def everything(self) -> tuple[str, ...]:
        """Return every key of the run, for deletion, except its `sessions` keys: `started` lists their groups."""
        streams = (self.prompts, self.completions, self.scored)
        leases = tuple(self.leases(group) for group in (GENERATORS, REWARDERS, TRAINERS))
        seen = tuple(self.seen(stream) for stream in streams)
        return (
            *streams, self.dead, self.run, self.epoch, self.takers, self.generators, self.refusals, self.started,
            self.required_version, self.events, *leases, *seen,
        )  # fmt: skip
