"""Which weights: a policy version alone does not say, once a trainer has resumed from a checkpoint and counts again.

    incarnation 1    0 -- 1 -- 2 -- 3 -- 4            killed: 3 and 4 are lost
    incarnation 2              2 -- 3 -- 4 -- 5       resumed from step 2: other weights, under the same numbers

Each incarnation of a run's trainer (the run's epoch counter in Redis) begins a lineage. Versions rise within one, and
what a newer incarnation pushed is newer than anything of an older one, whatever the numbers. On the wire: ``2:4``.
"""

import re
from typing import Final, NamedTuple, Self

from shared.message_invariants import MAX_INCARNATION

_EPOCH_BITS: Final = 20
MAX_EPOCH: Final = ((MAX_INCARNATION + 1) << _EPOCH_BITS) - 1
"""The last communicator epoch there can be."""
_ON_THE_WIRE: Final = re.compile(r"(?:([0-9]{1,8}):)?([0-9]{1,12})")
"""As many digits as the largest incarnation and the largest policy version of message_invariants.py have."""


class LineageVersion(NamedTuple):
    """A policy version of one lineage; ordered.

    Attributes:
        incarnation: Of the trainer that made it, from 1; 0 if nobody said.
        policy_version: Optimizer steps; -1 is no weights at all.
    """

    incarnation: int
    policy_version: int

    def __str__(self) -> str:
        """Return what ``parse`` reads, of any weights: NO_WEIGHTS have no name on the wire, and are not to be sent."""
        return f"{self.incarnation}:{self.policy_version}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what ``str`` made; a bare number is of incarnation 0.

        Raises:
            ValueError: It is no version.
        """
        found = _ON_THE_WIRE.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:100]!r} is no version of weights; one looks like 2:40")
        return cls(int(found[1] or 0), int(found[2]))

    def satisfies(self, required: "LineageVersion") -> bool:
        """Return whether weights of this version may be sampled from where ``required`` is the oldest allowed."""
        return self.policy_version >= 0 and self >= required


NO_WEIGHTS = LineageVersion(0, -1)
"""What a generator holds before the first push; as a requirement, it is satisfied by any weights."""


def epoch_of(incarnation: int, number: int) -> int:
    """Return the communicator epoch that is the ``number``-th, from 1, of a trainer's incarnation."""
    return (incarnation << _EPOCH_BITS) + number


def incarnation_of(epoch: int) -> int:
    """Return the incarnation whose communicator epoch that is."""
    return epoch >> _EPOCH_BITS
