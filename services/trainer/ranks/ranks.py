"""What a core knows of the other training ranks: how many there are, and how to exchange a few numbers with them.

    rank 0   [a] --+              +--> [a, b, c]
    rank 1   [b] --+-- gather ----+--> [a, b, c]
    rank 2   [c] --+              +--> [a, b, c]

Every rank calls the same methods in the same order. Weights and gradients take the mesh; numbers take `gather`, which
never touches a GPU. Bytes and float64 alone travel, never pickled objects. With one rank nothing is started and nothing
waits: `SINGLE`. Several are distributed_ranks.py's business.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shared.errors import UnavailableError

Floats = npt.NDArray[np.float64]


class RankLostError(UnavailableError):
    """A training rank died or was late. This process ends, and the run goes on from its checkpoint with all of them."""


class Ranks(Protocol):
    """The group of training ranks, as one of them sees it."""

    @property
    def rank(self) -> int:
        """Which one this is; 0 leads."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def mesh(self) -> Any | None:
        """DeviceMesh of torch over all ranks, of one dimension; None with one rank."""
        ...

    def gather(self, array: Floats) -> list[Floats]:
        """Return the one-dimensional arrays of all ranks, in rank order, on every rank. Lengths may differ.

        Raises:
            RankLostError: Not every rank came in time.
        """
        ...


class SingleRank:
    """A group of one."""

    rank = 0
    size = 1
    mesh = None

    def gather(self, array: Floats) -> list[Floats]:
        """See Ranks."""
        return [array]


SINGLE: Ranks = SingleRank()
