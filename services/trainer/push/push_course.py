"""The state of one push while it is under way."""

from services.trainer.push.membership import Retries
from services.trainer.push.packing import Parcel
from services.trainer.push.push_result import PushResult
from services.trainer.push.replicas import Fleet, Member
from shared.control import CommitReply, ReplicaInfo, Transport


class PushCourse:
    """The course of one push, from the first look at the fleet to its result.

    Args:
        policy_version: The version that is pushed.
        fleet: The fleet found at the beginning.

    Attributes:
        fleet: The fleet of the current or last attempt.
        failed: Replica to the reason why it did not get the version, over all attempts.
        blamed: The failed replicas that caused the failure.
        departed: The failed replicas that have left the run meanwhile.
        holding: Members of the attempt that already held the version.
        replies: Replies to the commits of the last attempt.
        begun: The parcel that members began to receive; None before begin.
        num_bytes: Bytes sent, or written to disk.
    """

    def __init__(self, policy_version: int, fleet: Fleet) -> None:
        self.policy_version = policy_version
        self.fleet = fleet
        self.failed: dict[str, str] = dict(fleet.refused)
        self.blamed: set[str] = set()
        self.departed: set[str] = set()
        self.holding: list[str] = []
        self.replies: dict[str, CommitReply] = {}
        self.begun: Parcel | None = None
        self.num_bytes = 0
        self._asked: dict[str, ReplicaInfo] = {}
        self.go_on_with(fleet)

    @property
    def transport(self) -> Transport:
        """The transport of this attempt."""
        return self.fleet.requirements.transport

    def go_on_with(self, fleet: Fleet) -> None:
        """Set the fleet of the next attempt."""
        self.fleet, self.begun = fleet, None
        self.failed |= fleet.refused
        self.holding = [name for name in self.holding if name in fleet.ready]
        self._asked |= {name: member.info for name, member in fleet.ready.items()}

    def lacking(self) -> dict[str, Member]:
        """Return the members of the attempt that have to receive."""
        return {name: member for name, member in self.fleet.ready.items() if name not in self.holding}

    def tell(self, retries: Retries, *, now: float) -> None:
        """Report to ``retries`` which replicas got the version and which members did not. Skips refused replicas."""
        for name, info in self._asked.items():
            if name in self.failed and name not in self.departed:
                retries.failed(info, is_to_blame=name in self.blamed, now=now)
            elif name in self.replies or name in self.holding:
                retries.succeeded(name)

    def result(self, *, communicator_epoch: int, total_s: float) -> PushResult:
        """Return the push's result."""
        return PushResult.of(
            self.replies,
            self.failed,
            holding=self.holding,
            left_out=(self.failed.keys() - self.fleet.ready.keys()) | self.departed,
            policy_version=self.policy_version,
            communicator_epoch=communicator_epoch,
            requirements=self.fleet.requirements,
            total_s=total_s,
            num_bytes=self.num_bytes,
        )
