"""Mean and standard deviation of one function's recent values, to make a drifting reward visible.

They are exact over the first thousand values. After that, each new value has a weight of one thousandth, and older
values fade away (D. H. D. West, 1979, with the weights of an exponential window).
"""

import math

WINDOW = 1000


class ValueDrift:
    """Running mean and standard deviation of one function's values."""

    def __init__(self) -> None:
        self._count = 0
        self.mean = 0.0
        self._variance = 0.0

    def add(self, value: float) -> None:
        """Add a finite value."""
        self._count = min(WINDOW, self._count + 1)
        distance = value - self.mean
        step = distance / self._count
        self.mean += step
        self._variance = (1.0 - 1.0 / self._count) * (self._variance + distance * step)
        if not math.isfinite(self._variance):  # overflow by values near the largest float: start again
            self._count, self.mean, self._variance = 0, 0.0, 0.0

    @property
    def std(self) -> float:
        """The standard deviation."""
        return math.sqrt(self._variance)
