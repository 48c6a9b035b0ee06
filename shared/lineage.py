"""Identifies weights by incarnation and policy version, because a resumed trainer counts versions from its checkpoint.

    incarnation 1    0 -- 1 -- 2 -- 3 -- 4            killed: 3 and 4 are lost
    incarnation 2              2 -- 3 -- 4 -- 5       resumed from step 2: other weights, under the same numbers

Each incarnation of a run's trainer (the run's epoch counter in Redis) begins a lineage. Versions rise within a lineage.
Weights of a newer incarnation are newer than all weights of an older one, whatever their versions. On the wire a
version is written ``2:4``.
"""

import re
from typing import Final, NamedTuple, Self

from shared.message_invariants import MAX_INCARNATION

_EPOCH_BITS: Final = 20
MAX_EPOCH: Final = ((MAX_INCARNATION + 1) << _EPOCH_BITS) - 1
"""The largest communicator epoch."""
_ON_THE_WIRE: Final = re.compile(r"(?:([0-9]{1,8}):)?([0-9]{1,12})")
"""The digits suffice for the largest incarnation and the largest policy version of message_invariants.py."""


class LineageVersion(NamedTuple):
    """A policy version, with the trainer incarnation that made it. Newer weights compare as greater.

    Attributes:
        incarnation: Incarnation of the trainer that made the weights, from 1; 0 if unknown.
        policy_version: Optimizer steps; -1 means no weights at all.
    """

    incarnation: int
    policy_version: int

    def __str__(self) -> str:
        """Return ``INCARNATION:VERSION``, such as ``2:38``. NO_WEIGHTS must not be sent: ``parse`` refuses its text."""
        return f"{self.incarnation}:{self.policy_version}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a text such as ``2:38``. A bare number means incarnation 0.

        Raises:
            ValueError: The text is not a version.
        """
        found = _ON_THE_WIRE.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:100]!r} is not a version of weights, such as 2:40")
        return cls(int(found[1] or 0), int(found[2]))

    def satisfies(self, required: "LineageVersion") -> bool:
        """Return whether these weights may be sampled from if ``required`` is the oldest version allowed."""
        return self.policy_version >= 0 and self >= required


NO_WEIGHTS = LineageVersion(0, -1)
"""The version that a generator holds before the first push. As a requirement, any weights satisfy it."""


def epoch_of(incarnation: int, number: int) -> int:
    """Return the id of a communicator epoch, from the trainer's incarnation and the epoch's number in it (from 1)."""
    return (incarnation << _EPOCH_BITS) + number


def incarnation_of(epoch: int) -> int:
    """Return the trainer incarnation in the id of a communicator epoch."""
    return epoch >> _EPOCH_BITS
