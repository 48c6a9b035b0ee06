"""Says when a reward function goes out of order and when it is back, and not each failure in between.

    works --_CALLS failed in a row--> out of order --_CALLS worked in a row--> works

As many calls for the way back as for the way out: a function that fails now and then, or works now and then, says so
once and not with every turn. Endpoints have a breaker instead (endpoints/breaker.py), which also leaves them alone.
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
    """Of an outage, or of what may become one."""
    failed_since_s: float = 0.0
    num_in_a_row: int = 0
    """Calls that speak against what is said of it now."""


class Outages:
    """Of Python functions, by name; ``clock`` is monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._standings: dict[str, _Standing] = {}

    def failed(self, name: str, why: str) -> None:
        """Count a call that failed for every completion."""
        standing = self._standings.setdefault(name, _Standing())
        if not standing.num_failed:
            standing.failed_since_s = self._clock()
        standing.num_failed += 1
        standing.num_in_a_row = 0 if standing.is_out else standing.num_in_a_row + 1
        if standing.num_in_a_row == _CALLS:
            standing.is_out, standing.num_in_a_row = True, 0
            log.warning("reward %s failed %d times in a row: %s", name, _CALLS, why)

    def worked(self, name: str) -> None:
        """Count a call that said something of a completion."""
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
