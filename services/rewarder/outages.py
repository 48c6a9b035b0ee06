"""Logs when a reward function stops working and when it works again, but not each failure in between.

    works --5 calls failed in a row--> out of order --5 calls worked in a row--> works

Both directions need five calls in a row, so a function that fails only sometimes is not logged at every change.
Endpoints have a breaker instead (endpoints/transport/breaker.py), which also stops the calls to them.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

_CALLS = 5


@dataclass
class _Standing:
    is_out: bool = False
    num_failed: int = 0
    """Failed calls of the current outage, or of a sequence that may become one."""
    failed_since_s: float = 0.0
    num_in_a_row: int = 0
    """Calls in a row that contradict the current state."""


class Outages:
    """Counts failed and successful calls of each Python reward function, and logs when an outage starts and ends.

    ``clock`` returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._standings: dict[str, _Standing] = {}

    def failed(self, name: str, why: str) -> None:
        """Count a call that failed for every completion. The fifth in a row is logged as the start of an outage."""
        standing = self._standings.setdefault(name, _Standing())
        if not standing.num_failed:
            standing.failed_since_s = self._clock()
        standing.num_failed += 1
        standing.num_in_a_row = 0 if standing.is_out else standing.num_in_a_row + 1
        if standing.num_in_a_row == _CALLS:
            standing.is_out, standing.num_in_a_row = True, 0
            log.warning("reward %s failed %d times in a row: %s", name, _CALLS, why)

    def worked(self, name: str) -> None:
        """Count a call that did not fail for every completion.

        During an outage, the fifth such call in a row is logged as the end of the outage.
        """
        standing = self._standings.get(name)
        if standing is None:
            return
        if standing.is_out:
            standing.num_in_a_row += 1
            if standing.num_in_a_row < _CALLS:
                return
            lasted_s = self._clock() - standing.failed_since_s
            log.info("reward %s works again: %d calls failed in %.0f s", name, standing.num_failed, lasted_s)
        del self._standings[name]
