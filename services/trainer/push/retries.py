"""Decides whether a push is due though nothing new was learnt, and when a replica that failed is tried again. Pure.

    holds the version, in the epoch  --> no     asleep with it --> no, until the next version
    came late, came back, missed one --> yes    failed --> after 5 s, 10 s, ... 5 min; at once with another engine

On streamed wires a push is for all members, so a replica that fails for good would have all the others load again what
they hold, for ever. A new version goes to everybody whenever it is there, whoever failed before.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shared.control import ReplicaInfo

FIRST_RETRY_S = 5.0
LAST_RETRY_S = 300.0


@dataclass(frozen=True)
class _Failures:
    count: int
    last_at: float
    engine_id: str


def retry_after_s(num_failures: int) -> float:
    """Return how long after the newest of some failures in a row a replica is left alone."""
    return min(FIRST_RETRY_S * 2.0 ** min(num_failures - 1, 30), LAST_RETRY_S)


def lacks(info: ReplicaInfo, *, epoch: int, policy_version: int | None) -> bool:
    """Return whether a replica does not serve what was pushed last, or is not in the epoch of that push."""
    if (info.epoch, info.policy_version) != (epoch, policy_version):
        return True
    return info.is_held and not info.is_asleep


class Retries:
    """How often each replica has failed since it last succeeded. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failures] = {}

    def failed(self, info: ReplicaInfo, *, is_to_blame: bool, now: float) -> None:
        """Take note that a replica has not got the version. The wait grows only if that was for a reason of its own."""
        before = self._failures.get(info.replica_id)
        count = 0 if before is None or before.engine_id != info.engine_id else before.count
        self._failures[info.replica_id] = _Failures(max(count + is_to_blame, 1), now, info.engine_id)

    def succeeded(self, replica_id: str) -> None:
        """Take note that a replica has the version."""
        self._failures.pop(replica_id, None)

    def is_due(self, info: ReplicaInfo, *, now: float) -> bool:
        """Return whether a replica may be tried: it has not failed, or long enough ago, or with another engine."""
        failures = self._failures.get(info.replica_id)
        if failures is None or failures.engine_id != info.engine_id:
            return True
        return now - failures.last_at >= retry_after_s(failures.count)

    def needs_push(self, infos: Iterable[ReplicaInfo], *, epoch: int, policy_version: int | None, now: float) -> bool:
        """Return whether one of these replicas lacks what was pushed last, and may be tried."""
        return any(
            lacks(info, epoch=epoch, policy_version=policy_version) and self.is_due(info, now=now) for info in infos
        )
