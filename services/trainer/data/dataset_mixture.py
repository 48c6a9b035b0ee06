"""Whose turn it is when several data sets are mixed: a pure function of the shares and the admission number.

    shares 1/2, 1/3, 1/6:
    number 11 --[1/2 : 1/2]--> right, as number 5 --[2/3 : 1/3]--> left, which is data set 1, as its number 3

A tree of two-way splits: of the first n numbers, n times the left share, rounded, go left. Nothing is drawn at random
and nothing is counted up, so any number is answered at once, by a restarted trainer too. At every moment a data set is
within half a prompt per level of the tree of its share: 0.5 with two data sets, 1 with four, 1.5 with eight (a level
adds at most the half of its own rounding to what came from above).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from shared.run_options.data import DatasetSource

_ZERO = Fraction(0)


@dataclass(frozen=True)
class Turn:
    """Which data set gives the prompt, and how many it gave before."""

    source: int
    number: int


class Mixture:
    """Data sets taking turns.

    Args:
        shares: One a data set; positive, with the sum 1.
    """

    def __init__(self, shares: Sequence[Fraction]) -> None:
        self.shares = tuple(shares)

    def turn(self, number: int) -> Turn:
        """Return whose turn admission ``number`` is, counted from 0."""
        first, end = 0, len(self.shares)
        while end - first > 1:
            middle = (first + end) // 2
            left = sum(self.shares[first:middle], _ZERO) / sum(self.shares[first:end], _ZERO)
            num_left = _rounded(number * left)
            if _rounded((number + 1) * left) > num_left:
                end, number = middle, num_left
            else:
                first, number = middle, number - num_left
        return Turn(first, number)

    def epoch(self, lengths: Sequence[int]) -> int:
        """Return the prompts of one epoch: as many as there are before a data set of these lengths is used up.

        TRL's mixture is as long. With shares in proportion to the lengths it is all rows, each of them once.
        """
        return max(1, int(min(length / share for length, share in zip(lengths, self.shares, strict=True))))


def mixture(sources: Sequence[DatasetSource], lengths: Sequence[int]) -> Mixture:
    """Return the mixture with the fractions that are set, or in proportion to the lengths if none is."""
    weights = [
        Fraction(length) if source.fraction is None else Fraction(repr(source.fraction))  # 0.7 is meant as 7/10
        for source, length in zip(sources, lengths, strict=True)
    ]
    return Mixture([weight / sum(weights, _ZERO) for weight in weights])


def _rounded(count: Fraction) -> int:
    return int(count + Fraction(1, 2))
