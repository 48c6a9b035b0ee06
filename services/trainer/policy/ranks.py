"""A training rank's interface to the other ranks: their number, their device mesh, and an exchange of small arrays.

    rank 0   [a] --+              +--> [a, b, c]
    rank 1   [b] --+-- gather ----+--> [a, b, c]
    rank 2   [c] --+              +--> [a, b, c]

Every rank calls the same methods in the same order. Weights and gradients use the mesh; numbers use `gather`, which
never touches a GPU. Only bytes and float64 are sent, never pickled objects. `SINGLE` is a group of one rank: it starts
nothing and never waits. distributed_ranks.py implements several ranks.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shared.errors import UnavailableError

Floats = npt.NDArray[np.float64]


class RankLostError(UnavailableError):
    """A training rank died or was late. This process ends, and all ranks resume the run from its checkpoint."""


class Ranks(Protocol):
    """The group of training ranks, as seen by one rank."""

    @property
    def rank(self) -> int:
        """Number of this rank; rank 0 leads."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def mesh(self) -> Any | None:
        """The one-dimensional DeviceMesh of torch over all ranks; None with one rank."""
        ...

    def gather(self, array: Floats) -> list[Floats]:
        """Return the one-dimensional arrays of all ranks, in rank order, on every rank. Lengths may differ.

        Raises:
            RankLostError: Not every rank came in time.
        """
        ...


class SingleRank:
    """Implements Ranks for a run with one training rank: starts nothing, and never waits."""

    rank = 0
    size = 1
    mesh = None

    def gather(self, array: Floats) -> list[Floats]:
        """Return a list with only this rank's array."""
        return [array]


SINGLE: Ranks = SingleRank()
