"""Where a run began that was submitted with ``resume_from_checkpoint``, and which rows of its data are left to it.

    source's checkpoint --> directory, step, steps made before, rows left --> the new run's record, its beginning.json

The new run counts its policy versions and its groups from 0. The schedule of the learning rate and the data go on.
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

import msgspec

from shared.message_invariants import Count

BEGINNING_FILE = "beginning.json"
"""File in the run's directory with its `Beginning`."""

Source = Literal["checkpoint", "model", "adapter"]

BEST = "best"
_RUN_AND_CHECKPOINT = re.compile(rf"(?P<run>[^:/]+)(?::(?P<which>\d{{1,12}}|{BEST}))?", re.ASCII)


class CheckpointReference(NamedTuple):
    """A checkpoint of a run as users write it: ``RUN``, ``RUN:STEP`` or ``RUN:best``."""

    run: str
    """An id, the beginning of an id, or a name."""
    which: str = ""
    """A step, or `BEST`; empty for the newest checkpoint."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the checkpoint that a text names; None if it is a path or something else."""
        match = _RUN_AND_CHECKPOINT.fullmatch(text)
        return None if match is None else cls(match["run"], match["which"] or "")

    def of(self, run_id: str) -> str:
        """Return this checkpoint's text for a run by its id."""
        return f"{run_id}:{self.which}" if self.which else run_id


class RowCursor(msgspec.Struct, frozen=True):
    """Maps the groups of a run to rows of the data, both by number: first the rows that were left out, then the rest.

    Attributes:
        left: Rows before ``next`` that no group has used up, in the order of their use.
        next: The first row that no group was made of.
    """

    left: tuple[Count, ...] = ()
    next: Count = 0

    def row(self, number: int) -> int:
        """Return the row of a group."""
        return self.left[number] if number < len(self.left) else self.next + number - len(self.left)

    def after(self, *, admitted: int, in_flight: Sequence[int]) -> "RowCursor":
        """Return the cursor of a run that takes over from one with this cursor.

        Args:
            admitted: Number of groups that were made of rows.
            in_flight: The groups among them that were in flight at the end, oldest first.
        """
        unused = [self.row(number) for number in in_flight]
        return RowCursor(left=(*unused, *self.left[admitted:]), next=self.row(max(admitted, len(self.left))))


class Beginning(msgspec.Struct, frozen=True):
    """The beginning of a run that does not begin with the weights of its ``model``.

    Attributes:
        source: The kind of directory.
        directory: The files that the run reads when it starts: the source itself, or links to its files.
        said: The value of ``resume_from_checkpoint``.
        weights_only: Whether optimizer, schedule and data begin anew.
        run_id: The run that wrote the checkpoint; None if it is unknown, or for another directory.
        run_name: That run's name.
        step: Optimizer steps that run had made; None for a directory without a checkpoint.
        steps_before: Optimizer steps that count into ``max_steps`` and the schedule of the learning rate.
        rows: The rows of the data that are left.
    """

    source: Source
    directory: str
    said: str
    weights_only: bool = False
    run_id: str | None = None
    run_name: str | None = None
    step: Count | None = None
    steps_before: Count = 0
    rows: RowCursor = RowCursor()

    def in_words(self) -> str:
        """Return the beginning in words, to follow "began from"."""
        if self.run_id is None:
            found = self.said
        else:
            name = f" ({self.run_name})" if self.run_name else ""
            found = f"step {self.step} of {self.run_id}{name}"
        return f"{found}, weights only" if self.weights_only else found
