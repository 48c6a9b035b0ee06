"""Records how every group ended: trained once, or dropped with a reason, never both, never twice.

    admitted = trained + dropped(reason) + in flight

The ledger is saved in the checkpoint, next to the weights it describes: "exactly once" means once in the weights that
survive. It only knows group numbers; scored_groups.py handles the streams.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from services.trainer.groups.group_ids import group_id
from shared.errors import HeadraceError
from shared.message_invariants import Count

DEAD_LETTER = "dead_letter"
RUN_STOPPED, RUN_ENDED = "run_stopped", "run_ended"
"""Reasons of groups that were in flight at the end of the run."""
_MAX_GROUPS = 10**8
"""The number of ids with eight digits."""


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    """The form of a ledger in a checkpoint. A pair is the first and last of consecutive group numbers."""

    admitted: Count
    trained: list[tuple[Count, Count]]
    dropped: dict[str, list[tuple[Count, Count]]]


class Ledger:
    """The outcome of each admitted group, by admission number: trained, dropped with a reason, or in flight.

    Args:
        admitted: Numbers below this one have been admitted.
    """

    def __init__(self, *, admitted: int = 0) -> None:
        self.admitted = admitted
        self._trained: set[int] = set()
        self._dropped: dict[str, set[int]] = {}

    def record_trained(self, number: int) -> None:
        """Record that the weights contain the group. Raises AssertionError if it was settled before."""
        if self.is_settled(number):
            raise AssertionError(f"group {group_id(number)} was settled before; it must not be trained again")
        self._trained.add(number)

    def record_dropped(self, number: int, reason: str) -> None:
        """Record that the group will never be trained. A group that is already settled stays as it is."""
        if not self.is_settled(number):
            self._dropped.setdefault(reason, set()).add(number)

    def revive(self, number: int) -> bool:
        """Undo the drop of a group whose dead letter was replayed. Return whether it was dropped as a dead letter."""
        buried = self._dropped.get(DEAD_LETTER, set())
        if number not in buried:
            return False
        buried.remove(number)
        return True

    def dropped_as(self, reason: str) -> set[int]:
        """Return the numbers of the groups that were dropped for this reason."""
        return set(self._dropped.get(reason, ()))

    def is_settled(self, number: int) -> bool:
        """Return whether the group was trained or dropped."""
        return number in self._trained or any(number in numbers for numbers in self._dropped.values())

    def in_flight(self) -> list[int]:
        """Return the admitted numbers that are not settled, oldest first."""
        settled = self._trained.union(*self._dropped.values())
        return [number for number in range(self.admitted) if number not in settled]

    def left_over(self) -> list[int]:
        """Return the numbers of groups that are in flight, or were when the run ended or was stopped, oldest first."""
        ended = (self._dropped.get(reason, set[int]()) for reason in (RUN_STOPPED, RUN_ENDED))
        return sorted({*self.in_flight()}.union(*ended))

    @property
    def num_in_flight(self) -> int:
        """Number of admitted groups that are not settled."""
        return self.admitted - self.num_trained - self.num_dropped

    @property
    def num_trained(self) -> int:
        """Number of groups that were trained."""
        return len(self._trained)

    @property
    def num_dropped(self) -> int:
        """Number of groups dropped for any reason."""
        return sum(len(numbers) for numbers in self._dropped.values())

    def dropped_by_reason(self) -> dict[str, int]:
        """Return the number of dropped groups for each reason."""
        return {reason: len(numbers) for reason, numbers in sorted(self._dropped.items()) if numbers}

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as JSON. Consecutive numbers are stored as ``[first, last]``."""
        return {
            "admitted": self.admitted,
            "trained": list(_runs(self._trained)),
            "dropped": {reason: list(_runs(numbers)) for reason, numbers in self._dropped.items() if numbers},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Ledger":
        """Return the ledger that ``to_json`` wrote.

        Raises:
            HeadraceError: It cannot be read or contradicts itself: a group has two outcomes, or an outcome without
                being admitted.
        """
        try:
            kept = msgspec.convert(data, _Kept)
        except (msgspec.ValidationError, RecursionError) as error:
            raise HeadraceError(f"the ledger of the checkpoint cannot be read: {error}") from error
        if kept.admitted > _MAX_GROUPS:
            raise HeadraceError(
                f"the ledger of the checkpoint has {kept.admitted} admitted groups, more than group ids allow"
            )
        end = 0
        for first, last in sorted(run for runs in (kept.trained, *kept.dropped.values()) for run in runs):
            if not end <= first <= last < kept.admitted:
                raise HeadraceError(
                    f"the ledger of the checkpoint contradicts itself: groups {first} to {last} of {kept.admitted} "
                    "admitted have two outcomes, or were never admitted"
                )
            end = last + 1
        ledger = cls(admitted=kept.admitted)
        ledger._trained = set(_numbers(kept.trained))
        ledger._dropped = {reason: set(_numbers(runs)) for reason, runs in kept.dropped.items()}
        return ledger


def _runs(numbers: Iterable[int]) -> Iterator[list[int]]:
    first: int | None = None
    last = -1
    for number in sorted(numbers):
        if first is not None and number == last + 1:
            last = number
            continue
        if first is not None:
            yield [first, last]
        first = last = number
    if first is not None:
        yield [first, last]


def _numbers(runs: Iterable[tuple[int, int]]) -> Iterator[int]:
    for first, last in runs:
        yield from range(first, last + 1)
