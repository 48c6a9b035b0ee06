"""Decides which of several data sets gives the next prompt: a pure function of the shares and the admission number.

    shares 1/2, 1/3, 1/6:
    number 11 --[1/2 : 1/2]--> right, as number 5 --[2/3 : 1/3]--> left, which is data set 1, as its number 3

The data sets are the leaves of a binary tree. Of the first n numbers that reach a node, n times the left share go left,
rounded. The result is neither random nor stored, so a restarted trainer computes the data set of any number directly. A
data set is never further from its share than half a prompt per level of the tree: 0.5 with two data sets, 1 with four,
1.5 with eight. The rounding of a level adds at most one half to a fraction of the deviation of the level above.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from shared.run_options.data import DatasetSource

_ZERO = Fraction(0)


@dataclass(frozen=True)
class Turn:
    """The index of the data set that gives a prompt, and the number of prompts that it gave before."""

    source: int
    number: int


class Mixture:
    """Assigns each admission number to one of several data sets, in proportion to their shares.

    Args:
        shares: One share per data set; positive, with the sum 1.
    """

    def __init__(self, shares: Sequence[Fraction]) -> None:
        self.shares = tuple(shares)

    def turn(self, number: int) -> Turn:
        """Return the data set that gives the prompt of an admission number, and how many prompts it gave before."""
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
        """Return the number of prompts in one epoch, which ends as soon as any of the data sets is used up.

        TRL's mixture has the same length. With shares in proportion to the lengths, an epoch contains all rows once.
        """
        return max(1, int(min(length / share for length, share in zip(lengths, self.shares, strict=True))))


def mixture(sources: Sequence[DatasetSource], lengths: Sequence[int]) -> Mixture:
    """Return the mixture with the configured fractions, or with shares in proportion to the lengths."""
    weights = [
        Fraction(length) if source.fraction is None else Fraction(repr(source.fraction))  # 0.7 is meant as 7/10
        for source, length in zip(sources, lengths, strict=True)
    ]
    return Mixture([weight / sum(weights, _ZERO) for weight in weights])


def _rounded(count: Fraction) -> int:
    return int(count + Fraction(1, 2))
