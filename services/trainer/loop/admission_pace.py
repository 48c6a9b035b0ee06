"""Decides how many groups to admit now: as staleness allows, or one now and then while no reward can be had.

A window of groups of which none has two scored completions means that a reward function is broken or away. To go on
sampling would burn the generators for nothing, and to fail the run would make an outage of an hour the end of a week:
so one group at a time tries whether it works again.
"""

import sys
import time

from services.trainer.loop.ledger import Ledger
from services.trainer.loop.schedule import BatchShape
from services.trainer.loop.staleness import num_admissible, window
from shared.run_config import RunConfig

PROBE_EVERY_S = 5.0


class AdmissionPace:
    """The pace of one run.

    Args:
        config: Of the run.
        ledger: Knows how many groups are in flight.
        probe_every_s: Pause between two tries while rewards fail.
    """

    def __init__(self, config: RunConfig, *, ledger: Ledger, probe_every_s: float = PROBE_EVERY_S) -> None:
        self._config = config
        self._shape = BatchShape.of(config)
        self._window = window(num_steps_left=sys.maxsize, max_staleness=config.max_staleness, shape=self._shape)
        self._ledger = ledger
        self._probe_every_s = probe_every_s
        self._next_probe_at = 0.0
        self.is_probing = False

    def num_to_admit(
        self, *, num_unadmitted: int, num_waiting: int, num_steps_left: int, unscorable_in_a_row: int
    ) -> int:
        """Return how many groups to admit now.

        Args:
            num_unadmitted: Groups the ledger counts as in flight that are to be admitted again (admission.py).
            num_waiting: Scored groups that wait for a full batch.
            num_steps_left: Optimizer steps still to be made.
            unscorable_in_a_row: Groups that came back without two scored completions since the last that had them.
        """
        num_in_flight = self._ledger.num_in_flight - num_unadmitted
        count = num_admissible(
            num_in_flight=num_in_flight,
            num_steps_left=num_steps_left,
            max_staleness=self._config.max_staleness,
            shape=self._shape,
        )
        self.is_probing = unscorable_in_a_row >= self._window
        if not self.is_probing or not count:
            return count
        if num_in_flight > num_waiting or time.monotonic() < self._next_probe_at:
            return 0
        self._next_probe_at = time.monotonic() + self._probe_every_s
        return 1

    def waiting_for(self, batch_waits_for: str) -> str:
        """Return what the run waits for, which while probing is its user."""
        if not self.is_probing:
            return batch_waits_for
        return (
            f"a reward function to work again; one group every {self._probe_every_s:.0f} s tries it. "
            "Mend it, then submit a dry run, which takes its new code in; or stop the run. "
            f"Meanwhile {batch_waits_for}"
        )
