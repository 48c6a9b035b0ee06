"""Decides how many groups to admit now: as staleness allows; while the run is paused none, or one now and then.

    goes on             as many as may be in flight
    paused by user      none
    paused by rewards   a probe, when nothing else is under way: one group tries whether they work again

To go on sampling while rewards fail would burn the generators for nothing, and to fail the run would make an outage of
an hour the end of a week.
"""

import time

from services.trainer.loop.ledger import Ledger
from services.trainer.loop.schedule import BatchShape
from services.trainer.loop.staleness import num_admissible
from shared.pause import PausedBy
from shared.run_config import RunConfig

PROBE_EVERY_S = 5.0


class AdmissionPace:
    """The pace of one run.

    Args:
        config: Of the run.
        ledger: Knows how many groups are in flight.
        probe_every_s: Pause between two probes.
    """

    def __init__(self, config: RunConfig, *, ledger: Ledger, probe_every_s: float = PROBE_EVERY_S) -> None:
        self.probe_every_s = probe_every_s
        self._config = config
        self._shape = BatchShape.of(config)
        self._ledger = ledger
        self._next_probe_at = 0.0

    def num_to_admit(
        self, *, num_unadmitted: int, num_waiting: int, num_steps_left: int, paused_by: PausedBy | None
    ) -> int:
        """Return how many groups to admit now; while rewards have paused the run, that is a probe or nothing.

        Args:
            num_unadmitted: Groups the ledger counts as in flight that are to be admitted again (admission.py).
            num_waiting: Scored groups that wait for a full batch.
            num_steps_left: Optimizer steps still to be made.
            paused_by: Who has paused the run, if it is paused.
        """
        if paused_by == "user":
            return 0
        num_in_flight = self._ledger.num_in_flight - num_unadmitted
        count = num_admissible(
            num_in_flight=num_in_flight,
            num_steps_left=num_steps_left,
            max_staleness=self._config.max_staleness,
            shape=self._shape,
        )
        if paused_by is None or not count:
            return count
        if num_in_flight > num_waiting or time.monotonic() < self._next_probe_at:
            return 0
        self._next_probe_at = time.monotonic() + self.probe_every_s
        return 1
