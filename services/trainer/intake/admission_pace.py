"""Decides how many prompt groups to admit now. In a pause it admits none, or one test group now and then.

    not paused          as many as may be in flight (admission_depth.py)
    paused by user      none
    paused by rewards   a test group, when nothing else is under way: one group tests whether rewards work again

Sampling at full speed while rewards fail would waste the generators. Failing the run instead would let an outage of an
hour end a run of a week.
"""

import sys
import time

from services.trainer.groups.admission_depth import AdmissionDepth
from services.trainer.groups.ledger import Ledger
from services.trainer.groups.schedule import BatchShape
from shared.pause import PausedBy
from shared.run_options.run_config import RunConfig

TEST_GROUP_EVERY_S = 5.0


class AdmissionPace:
    """Decides how many prompt groups a run admits now, from the number in flight and from whether it is paused.

    Args:
        config: The run's settings.
        ledger: Counts the groups in flight.
        test_group_every_s: Shortest time between two test groups, in seconds.
    """

    def __init__(self, config: RunConfig, *, ledger: Ledger, test_group_every_s: float = TEST_GROUP_EVERY_S) -> None:
        self.test_group_every_s = test_group_every_s
        self._ledger = ledger
        self._depth = AdmissionDepth(
            shape=BatchShape.of(config),
            max_staleness=config.max_staleness,
            is_eager=config.admission == "eager",
        )
        self._batch_chosen_at: float | None = None
        self._waited_s = 0.0
        self._next_test_group_at = 0.0

    def num_to_admit(
        self, *, num_unadmitted: int, num_waiting: int, num_steps_left: int, paused_by: PausedBy | None
    ) -> int:
        """Return how many groups to admit now: 1 (a test group) or 0 if rewards paused the run, 0 if a user did.

        Args:
            num_unadmitted: Groups that the ledger counts as in flight but that wait to be admitted again
                (admission.py).
            num_waiting: Scored groups that wait for a full batch.
            num_steps_left: Remaining optimizer steps.
            paused_by: Who or what has paused the run; None if it is not paused.
        """
        if paused_by == "user":
            return 0
        num_in_flight = self._ledger.num_in_flight - num_unadmitted
        count = max(0, self._depth.max_unsettled(num_steps_left=num_steps_left) - num_in_flight)
        if paused_by is None or not count:
            return count
        if num_in_flight > num_waiting or time.monotonic() < self._next_test_group_at:
            return 0
        self._next_test_group_at = time.monotonic() + self.test_group_every_s
        return 1

    def num_ahead(self, *, num_scored: int) -> int:
        """Return how many groups may be sampled and scored while ``num_scored`` groups wait to be trained."""
        return max(0, self._depth.max_unsettled(num_steps_left=sys.maxsize) - num_scored)

    def note_wait(self, waited_s: float) -> None:
        """Record that the trainer waited ``waited_s`` seconds because too few groups were scored."""
        self._waited_s += waited_s

    def note_pause(self) -> None:
        """Record that the run is paused: its next batch says nothing about the speed of the generators."""
        self._batch_chosen_at = None

    def note_batch(self, *, num_spare: int) -> None:
        """Record that a batch was chosen, while ``num_spare`` other groups were scored already."""
        now = time.monotonic()
        # The first batch of a process has waited for generators to start, which says nothing about their speed.
        if self._batch_chosen_at is not None:
            waited_share = self._waited_s / max(now - self._batch_chosen_at, 1e-9)
            self._depth.note_batch(waited_share=waited_share, num_spare=num_spare)
        self._batch_chosen_at, self._waited_s = now, 0.0
