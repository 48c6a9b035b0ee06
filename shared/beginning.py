"""The starting point of a run submitted with ``resume_from_checkpoint``: its weights, steps and remaining data rows.

    a run's checkpoint --> directory, step, steps made before, rows left --> the new run's record, its beginning.json

The new run counts its policy versions and its groups from 0. The learning-rate schedule and the data continue where
the checkpoint left off, unless only the weights are taken.
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
        """Return this reference as text, with ``run_id`` in place of the run as the user wrote it."""
        return f"{run_id}:{self.which}" if self.which else run_id


class RowCursor(msgspec.Struct, frozen=True):
    """Maps the numbers of a run's prompt groups to row numbers of its data. Rows that an earlier run left come first.

    Attributes:
        left: The unused rows before ``next``, in the order in which groups take them.
        next: The row from which on all rows are unused.
    """

    left: tuple[Count, ...] = ()
    next: Count = 0

    def row(self, number: int) -> int:
        """Return the number of the row from which group ``number`` is made; both count from 0."""
        return self.left[number] if number < len(self.left) else self.next + number - len(self.left)

    def after(self, *, admitted: int, in_flight: Sequence[int]) -> "RowCursor":
        """Return the cursor of the next run, which continues with the rows that a run with this cursor left.

        Args:
            admitted: Number of groups that the ended run made from rows.
            in_flight: Numbers of its groups that were in flight at its end, oldest first. Their rows are used again.
        """
        unused = [self.row(number) for number in in_flight]
        return RowCursor(left=(*unused, *self.left[admitted:]), next=self.row(max(admitted, len(self.left))))


class Beginning(msgspec.Struct, frozen=True):
    """The starting point of a run that does not start with the weights of its ``model``.

    Attributes:
        source: Whether it is a run's checkpoint, a model directory, or a PEFT adapter.
        directory: The files that the run reads when it starts: the source itself, or links to its files.
        said: The value of ``resume_from_checkpoint``.
        weights_only: Whether optimizer, schedule and data begin anew.
        run_id: The run that wrote the checkpoint; None if it is unknown, or for another directory.
        run_name: The name of that run; None if it has none, or is unknown.
        step: Optimizer steps that the checkpoint's run had made; None for a directory without a checkpoint.
        steps_before: Earlier optimizer steps that count towards ``max_steps`` and the learning-rate schedule.
        rows: The rows of the data that this run uses.
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
        """Return a phrase that follows "began from", such as ``step 40 of RUN (NAME), weights only``."""
        if self.run_id is None:
            found = self.said
        else:
            name = f" ({self.run_name})" if self.run_name else ""
            found = f"step {self.step} of {self.run_id}{name}"
        return f"{found}, weights only" if self.weights_only else found
