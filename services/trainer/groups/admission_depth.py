"""Decides how many groups are sampled ahead of training: as few as possible without making the trainer wait.

    unsettled groups  =  the batch in training  +  groups ahead of it            at most the window of staleness.py

A group that is admitted too early only grows stale in a queue. So the depth begins at one batch ahead: this batch is
sampled while the previous one is trained. The depth is then corrected at every batch:

    the trainer waited for groups           half a batch more ahead, at once
    each of the last 8 batches left at      n / 2 groups fewer ahead, but not fewer than one batch
    least n scored groups unused

Waiting for stragglers (staleness.py) does not count: more groups ahead would not finish them earlier.

If the generators are the slower part, the trainer always waits, and the depth grows to the window: a larger number of
groups in flight also makes larger decoding batches. If they are faster, sampling starts just in time, and a group is
trained one batch after the push of the weights that sampled it.

The depth is not in checkpoints. It decides when a group is sampled, which depends on timing in any case, but not what
is sampled: group n is row n. A resumed trainer begins at one batch ahead again. The groups of its predecessor count as
unsettled, and it trains them first.

Pure: no clock, no I/O.
"""

import math

from services.trainer.groups.schedule import BatchShape
from services.trainer.groups.staleness import window

_WAIT_SHARE = 0.03
"""A shorter wait, as a share of the time between two batches, is noise: groups may arrive just after the trainer looked
for them."""
_NUM_BATCHES = 8
"""Batches over which spare groups are watched before the depth is reduced. Completions of different lengths make the
number of spare groups vary from batch to batch."""


class AdmissionDepth:
    """The number of prompt groups that a run may have admitted and neither trained nor dropped.

    Args:
        shape: Shape of the run's batches.
        max_staleness: Bound on staleness, in optimizer steps.
        is_eager: Whether to always use the largest number that ``max_staleness`` allows.
    """

    def __init__(self, *, shape: BatchShape, max_staleness: int, is_eager: bool) -> None:
        self._shape = shape
        self._max_staleness = max_staleness
        self._batch = shape.groups(num_steps=shape.steps)
        self._max_ahead = shape.groups(num_steps=(max_staleness + 1) // shape.steps * shape.steps) - self._batch
        self._is_eager = is_eager
        self._ahead = self._max_ahead if is_eager else min(self._batch, self._max_ahead)
        self._spare: list[int] = []

    def max_unsettled(self, *, num_steps_left: int) -> int:
        """Return how many groups may be unsettled at a time: at least the groups of the next batch.

        Args:
            num_steps_left: Remaining optimizer steps. Groups that no step will use are not sampled.
        """
        bound = window(num_steps_left=num_steps_left, max_staleness=self._max_staleness, shape=self._shape)
        return min(bound, self._batch + self._ahead)

    def note_batch(self, *, waited_share: float, num_spare: int) -> None:
        """Adjust the number of groups ahead after a batch was chosen, unless ``is_eager``.

        Args:
            waited_share: Share of the time since the previous batch in which the trainer waited for groups.
            num_spare: Number of scored groups that are not in the batch.
        """
        if self._is_eager:
            return
        if waited_share > _WAIT_SHARE:
            self._ahead = min(self._max_ahead, self._ahead + math.ceil(self._batch / 2))
            self._spare.clear()
            return
        self._spare.append(num_spare)
        if len(self._spare) == _NUM_BATCHES:
            reduced = self._ahead - math.ceil(min(self._spare) / 2)
            self._ahead = max(min(self._batch, self._max_ahead), reduced)
            self._spare.clear()
