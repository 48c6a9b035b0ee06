"""A scored group that waits for its batch."""

from dataclasses import dataclass

from shared.messages import ScoredGroup


@dataclass(frozen=True)
class WaitingGroup:
    """A scored group that may be trained."""

    number: int
    group: ScoredGroup
    oldest_policy_version: int
