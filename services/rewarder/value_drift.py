"""Mean and spread of what one function scored lately, so that a reward that drifts can be seen.

Exact over the first thousand values; from then on each value counts a thousandth of what is known, and what is older
fades away (D. H. D. West, 1979, with the weights of an exponential window).
"""

import math

WINDOW = 1000


class ValueDrift:
    """What is remembered of one function's values."""

    def __init__(self) -> None:
        self._count = 0
        self.mean = 0.0
        self._variance = 0.0

    def add(self, value: float) -> None:
        """Take one finite value in."""
        self._count = min(WINDOW, self._count + 1)
        distance = value - self.mean
        step = distance / self._count
        self.mean += step
        self._variance = (1.0 - 1.0 / self._count) * (self._variance + distance * step)
        if not math.isfinite(self._variance):  # values near the largest float: nothing can be told from them
            self._count, self.mean, self._variance = 0, 0.0, 0.0

    @property
    def std(self) -> float:
        """Standard deviation."""
        return math.sqrt(self._variance)
