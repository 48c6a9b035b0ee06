"""A recent rate of arrivals that come in bursts: several groups finish together, then none for a step or two."""

from collections import deque

WINDOW_S = 10.0


class RecentRate:
    """A rate over the newest steps that took at least ``WINDOW_S`` together, or over all steps until then."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque()
        self._amount = 0.0
        self._elapsed_s = 0.0

    def add(self, amount: float, *, elapsed_s: float) -> float:
        """Add the amount of a step that took ``elapsed_s`` seconds, and return the rate per second."""
        self._steps.append((amount, elapsed_s))
        self._amount += amount
        self._elapsed_s += elapsed_s
        while self._elapsed_s - self._steps[0][1] >= WINDOW_S:
            oldest, took_s = self._steps.popleft()
            self._amount -= oldest
            self._elapsed_s -= took_s
        return self._amount / self._elapsed_s
