"""PushResult: the replicas that received a push or failed, with reasons and durations. Filled in during the push."""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from services.trainer.push.membership import Retries, already_serves
from services.trainer.push.replicas import Fleet, Member
from shared.control import CommitReply, ReplicaInfo
from shared.lineage import LineageVersion


@dataclass
class PushResult:
    """The result of one push. The sender fills it in while the push is under way.

    Attributes:
        fleet: The fleet of the last attempt.
        communicator_epoch: Epoch of the last attempt's communicator.
        asked: Every replica that was a member of an attempt, with its state when that attempt began.
        failed: Replica to the reason why it does not hold ``policy_version``, over all attempts.
        blamed: The failed replicas that caused the failure.
        departed: The failed replicas that have left the run meanwhile.
        had_before: Members of the last attempt that served ``policy_version`` before it.
        replies: Replica to its reply to the commit of the last attempt.
        begun_checksum: For disk: checksum of the weights that members began to read; None before begin.
        num_bytes: Bytes sent, counted once for all members together; for disk, bytes written.
        total_s: Duration of the whole push, including a second attempt.
    """

    policy_version: int
    fleet: Fleet
    communicator_epoch: int = 0
    asked: dict[str, ReplicaInfo] = field(default_factory=dict[str, ReplicaInfo])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    blamed: set[str] = field(default_factory=set[str])
    departed: set[str] = field(default_factory=set[str])
    had_before: list[str] = field(default_factory=list[str])
    replies: dict[str, CommitReply] = field(default_factory=dict[str, CommitReply])
    begun_checksum: str | None = None
    num_bytes: int = 0
    total_s: float = 0.0

    def __post_init__(self) -> None:
        self.go_on_with(self.fleet)

    def go_on_with(self, fleet: Fleet) -> None:
        """Prepare the result for the next attempt, with the replicas in ``fleet``."""
        self.fleet, self.begun_checksum = fleet, None
        self.failed |= fleet.refused
        self.had_before = [name for name in self.had_before if name in fleet.ready]
        self.asked |= {name: member.info for name, member in fleet.ready.items()}

    def lacking(self) -> dict[str, Member]:
        """Return the members of the attempt that do not serve the pushed version yet, and have to receive it."""
        return {name: member for name, member in self.fleet.ready.items() if name not in self.had_before}

    def find_served(self, version: LineageVersion, *, checksum: str | None) -> None:
        """Record the members that already serve exactly these weights, and do not have to receive them."""
        ready = self.fleet.ready.items()
        self.had_before = [name for name, member in ready if already_serves(member.info, version, checksum=checksum)]

    def is_unreadable(self, aborted: Iterable[ReplicaInfo], *, failed: Container[str]) -> bool:
        """Return whether a member's state after an abort shows that it could not read the weights on disk.

        A member that replied to the commit, or has staged these weights, could read them.
        """
        return self.begun_checksum is not None and any(
            info.replica_id in failed
            and info.replica_id not in self.replies
            and info.staged_checksum != self.begun_checksum
            for info in aborted
        )

    def tell(self, retries: Retries, *, now: float) -> None:
        """Report to ``retries`` which members got the version and which did not. Skips refused replicas."""
        for name, info in self.asked.items():
            if name in self.failed and name not in self.departed:
                retries.failed(info, is_to_blame=name in self.blamed, now=now)
            elif name in self.replies or name in self.had_before:
                retries.succeeded(name)

    @property
    def members(self) -> tuple[str, ...]:
        """Replicas that hold ``policy_version``: they confirmed it in this push, or held it before."""
        return tuple(name for name in (*self.had_before, *self.replies) if name not in self.failed)

    @property
    def is_confirmed(self) -> bool:
        """Whether the last attempt had members, and all of them hold the version.

        A replica does not count if it was refused, was left out after the first attempt, or left the run before it had
        loaded the version.
        """
        left_out = (self.failed.keys() - self.fleet.ready.keys()) | self.departed
        return bool(self.members) and self.failed.keys() <= left_out

    @property
    def standstill_s(self) -> float:
        """Time for which decoding stood still, in seconds; the longest of all members."""
        return self._longest(lambda reply: reply.standstill_s)

    @property
    def receive_s(self) -> float:
        """Time from begin to the last received byte, in seconds; the longest of all members."""
        return self._longest(lambda reply: reply.receive_s)

    @property
    def load_s(self) -> float:
        """Part of the standstill in which the weights are loaded, in seconds; the longest of all members."""
        return self._longest(lambda reply: reply.load_s)

    @property
    def probe_s(self) -> float:
        """Time from resumed decoding to the comparison of the probe, in seconds; the longest of all members."""
        return self._longest(lambda reply: reply.probe_s)

    @property
    def probe_max_diff(self) -> float | None:
        """Largest difference of a logprob of the probe, in nats; None without a probe."""
        differences = [reply.probe_max_diff for reply in self.replies.values() if reply.probe_max_diff is not None]
        return max(differences, default=None)

    @property
    def num_probes_failed(self) -> int:
        """Number of replicas that failed the probe."""
        return sum(reply.probe_failure is not None for reply in self.replies.values())

    def _longest(self, duration: Callable[[CommitReply], float]) -> float:
        return max(map(duration, self.replies.values()), default=0.0)
