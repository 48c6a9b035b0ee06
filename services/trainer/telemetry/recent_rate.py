"""How much a second lately, where it comes in bursts: several groups finish together, then none for a step or two."""

from collections import deque

WINDOW_S = 10.0


class RecentRate:
    """A rate over the newest steps that took ``WINDOW_S`` together; over all of them while there are fewer."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque()
        self._amount = 0.0
        self._elapsed_s = 0.0

    def add(self, amount: float, *, elapsed_s: float) -> float:
        """Note what came in a step that took ``elapsed_s``, in seconds, and return the rate a second."""
        self._steps.append((amount, elapsed_s))
        self._amount += amount
        self._elapsed_s += elapsed_s
        while self._elapsed_s - self._steps[0][1] >= WINDOW_S:
            oldest, took_s = self._steps.popleft()
            self._amount -= oldest
            self._elapsed_s -= took_s
        return self._amount / self._elapsed_s
