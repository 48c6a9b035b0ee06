"""Decides whether to push again without a new version, and when to retry a replica that failed. Pure.

    holds the version, in the epoch     --> no
    asleep with the version             --> no, until the next version
    late, came back, or missed a push   --> yes
    failed                              --> after 5 s, 10 s, ... 5 min; at once with another engine

On wires a push goes to all members, so a replica that always fails would make all the others reload the weights they
hold, forever. A new version is pushed to all replicas at once, including those with earlier failures.
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
    """Return how long to wait after the latest of ``num_failures`` consecutive failures, in seconds."""
    return min(FIRST_RETRY_S * 2.0 ** min(num_failures - 1, 30), LAST_RETRY_S)


def lacks(info: ReplicaInfo, *, epoch: int, policy_version: int | None) -> bool:
    """Return whether a replica does not serve the last pushed version, or is not in the epoch of that push."""
    if (info.epoch, info.policy_version) != (epoch, policy_version):
        return True
    return info.is_held and not info.is_asleep


class Retries:
    """Counts each replica's failures since its last success. All times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failures] = {}

    def failed(self, info: ReplicaInfo, *, is_to_blame: bool, now: float) -> None:
        """Record that a replica did not get the version. The wait grows only if the replica itself is to blame."""
        before = self._failures.get(info.replica_id)
        count = 0 if before is None or before.engine_id != info.engine_id else before.count
        self._failures[info.replica_id] = _Failures(max(count + is_to_blame, 1), now, info.engine_id)

    def succeeded(self, replica_id: str) -> None:
        """Record that a replica has the version."""
        self._failures.pop(replica_id, None)

    def is_due(self, info: ReplicaInfo, *, now: float) -> bool:
        """Return whether a replica may be tried: it has not failed, its wait is over, or it has another engine."""
        failures = self._failures.get(info.replica_id)
        if failures is None or failures.engine_id != info.engine_id:
            return True
        return now - failures.last_at >= retry_after_s(failures.count)

    def needs_push(self, infos: Iterable[ReplicaInfo], *, epoch: int, policy_version: int | None, now: float) -> bool:
        """Return whether any of these replicas lacks the last pushed version and may be tried."""
        return any(
            lacks(info, epoch=epoch, policy_version=policy_version) and self.is_due(info, now=now) for info in infos
        )
