"""Defines the scored group that waits in the trainer until a batch uses it."""

from dataclasses import dataclass

from shared.messages import ScoredGroup


@dataclass(frozen=True)
class WaitingGroup:
    """A scored group, its number, and the policy version that sampled its oldest token."""

    number: int
    group: ScoredGroup
    oldest_policy_version: int
