"""The interface between the scorer and the sources of rewards: Python functions, endpoints, reward models."""

from typing import Protocol

from services.rewarder.python_functions.worker_frames import Answer, Inspected, Refused
from services.rewarder.reward_call import RewardCall


class RewardSource(Protocol):
    """The reward functions of one kind."""

    async def knows(self, name: str) -> bool:
        """Return whether this source handles ``name``. It must be quick, because it is called for every score."""
        ...

    def exists(self, name: str) -> bool:
        """Return whether ``name`` is known to exist. Only such names become labels of metrics."""
        ...

    async def inspect(self, name: str) -> Inspected | Refused:
        """Return a description of ``name``, or the reason why it cannot be used."""
        ...

    async def call(self, name: str, call: RewardCall, *, timeout_s: float, lane: str) -> tuple[Answer, float]:
        """Return one verdict per completion, and the seconds that it took.

        Args:
            name: A name that this source knows.
            call: The rows to score. The source may change the prompts, completions and columns.
            timeout_s: Deadline of the work itself, in seconds. The wait for a turn has a limit of its own.
            lane: The run's id or the name of the HTTP lane. Lanes take turns.

        Raises:
            RewardFailure: There is no answer. Its outcome says why.
        """
        ...
