"""What the scorer needs of whatever answers for a reward name, beside Python functions: endpoints, reward models."""

from typing import Protocol

from services.rewarder.reward_call import RewardCall
from services.rewarder.worker_frames import Answer, Inspected, Refused


class RewardSource(Protocol):
    """Reward functions of one kind."""

    async def knows(self, name: str) -> bool:
        """Return whether ``name`` is one of these. Asked for every call: it must be quick."""
        ...

    def exists(self, name: str) -> bool:
        """Return whether ``name`` was found to be there: only such names are labels of metrics."""
        ...

    async def inspect(self, name: str) -> Inspected | Refused:
        """Return what ``name`` is, or why it cannot be used."""
        ...

    async def call(self, name: str, call: RewardCall, *, timeout_s: float, lane: str) -> tuple[Answer, float]:
        """Return one verdict a completion, and the seconds it took.

        Args:
            name: One that this source knows.
            call: Not to be changed: other functions are called with it at the same time.
            timeout_s: Deadline of the work; waiting for a turn at what is scarce has its own.
            lane: The run, or the HTTP routes; lanes take turns at what is scarce.

        Raises:
            RewardFailure: There is no answer; the outcome says why.
        """
        ...
