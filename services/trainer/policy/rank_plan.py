"""Distributes the rows of a step over training ranks and forward passes, balanced by tokens. Pure.

             pass 0          pass 1          pass 2 (no backward)        numbers: indices of rows
    rank 0   [ 7 3 ]         [ 1 9 ]         [ 4 ]
    rank 1   [ 8 ]           [ 0 2 ]         [ ]         an empty pass: no rows, but it takes part

Sharded ranks meet in every layer of every pass. All of them therefore make the same number of passes, with a backward
pass at the same places, and each pass takes as long as its fullest rank. Hence two rules: as few passes as the token
budget allows, and equally full ranks within each pass. Rows are dealt longest first to the emptiest bin (LPT, Graham
1969: the fullest bin is at most 4/3 as full as in the best deal). Bins of similar size then form a pass.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """One forward pass of one rank: its rows, and whether a backward pass follows."""

    row_indices: tuple[int, ...]
    """Longest row first; empty if the rank only takes part in collectives."""
    needs_backward: bool


RankPlan = tuple[Slot, ...]


def plan_passes(
    lengths: Sequence[int],
    needs_backward: Sequence[bool],
    *,
    num_ranks: int,
    max_tokens: int,
    max_rows: int | None = None,
) -> tuple[RankPlan, ...]:
    """Return the passes of each rank, as indices into ``lengths``. Each row is in exactly one pass.

    Rows without a backward pass are put into separate passes at the end.

    Args:
        lengths: Number of tokens of each row.
        needs_backward: Whether each row needs a backward pass.
        num_ranks: Number of ranks.
        max_tokens: Maximum number of tokens in one pass of one rank. A longer row gets a pass of its own.
        max_rows: Maximum number of rows in one pass of one rank; None for no limit.
    """
    plans: list[list[Slot]] = [[] for _ in range(num_ranks)]
    num_tokens = [0] * num_ranks
    for wanted in (True, False):
        indices = [index for index, needs in enumerate(needs_backward) if bool(needs) is wanted]
        bins = _balanced_bins([(lengths[index], index) for index in indices], num_ranks, max_tokens, max_rows)
        bins.sort(key=lambda rows: (-_total(rows), rows))
        for first in range(0, len(bins), num_ranks):
            # Within a pass, the fullest bin goes to the rank with the fewest tokens so far.
            by_load = sorted(range(num_ranks), key=lambda rank: (num_tokens[rank], rank))
            for rank, rows in zip(by_load, bins[first : first + num_ranks], strict=True):
                plans[rank].append(Slot(tuple(index for _, index in rows), wanted))
                num_tokens[rank] += _total(rows)
    return tuple(tuple(plan) for plan in plans)


_Row = tuple[int, int]
"""A row's number of tokens, and its index."""


def _balanced_bins(
    rows: Sequence[_Row], num_ranks: int, max_tokens: int, max_rows: int | None
) -> list[tuple[_Row, ...]]:
    """Put the rows into bins of at most ``max_tokens`` and ``max_rows``. A row that is too long gets its own bin.

    The number of bins is the smallest multiple of ``num_ranks`` that suffices. Some bins may be empty.
    """
    longest_first = sorted(rows, key=lambda row: (-row[0], row[1]))
    too_long = [(row,) for row in longest_first if row[0] > max_tokens]
    others = longest_first[len(too_long) :]
    num_bins = -(-(len(too_long) + -(-_total(others) // max_tokens)) // num_ranks) * num_ranks
    while True:
        bins = _deal(others, num_bins - len(too_long), max_tokens, max_rows)
        if bins is not None:
            return too_long + bins
        num_bins += num_ranks


def _deal(
    longest_first: Sequence[_Row], num_bins: int, max_tokens: int, max_rows: int | None
) -> list[tuple[_Row, ...]] | None:
    """Deal each row to the emptiest bin; return None if a bin gets too full.

    With as many bins as rows, every row gets an empty bin, so the search for the number of bins ends.
    """
    bins: list[list[_Row]] = [[] for _ in range(num_bins)]
    emptiest = [(0, number) for number in range(num_bins)]
    for row in longest_first:
        if not emptiest or emptiest[0][0] + row[0] > max_tokens:
            return None
        total, number = heapq.heappop(emptiest)
        bins[number].append(row)
        if max_rows is None or len(bins[number]) < max_rows:
            heapq.heappush(emptiest, (total + row[0], number))
    return [tuple(rows) for rows in bins]


def _total(rows: Sequence[_Row]) -> int:
    return sum(length for length, _ in rows)
