"""Leaves an endpoint alone that fails again and again, and tries now and then whether it is back.

    closed --failures in a row--> open --pause--> half-open: one request is let through
       ^                           ^                 |        |
       +----------- it answered ---|-----------------+        |
                                   +-------- it failed -------+

Without it, every group of a run would wait out the deadline of an endpoint that is down, and the endpoint would meet
all of them at once when it comes back.
"""

from typing import Literal

State = Literal["closed", "half-open", "open"]


class Breaker:
    """Of one endpoint. ``now_s`` is a monotonic clock.

    Args:
        max_failures: In a row, after which it opens.
        pause_s: Until one request is let through.
    """

    def __init__(self, *, max_failures: int, pause_s: float) -> None:
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._num_failures = 0
        self._opened_at_s: float | None = None
        self._is_probing = False
        self._why = ""

    @property
    def state(self) -> State:
        """Where it stands; half-open while a probe is under way."""
        if self._opened_at_s is None:
            return "closed"
        return "half-open" if self._is_probing else "open"

    def why_not(self, now_s: float) -> str | None:
        """Return why no request may go out now, or None if one may."""
        if self._opened_at_s is None:
            return None
        left_s = self._opened_at_s + self._pause_s - now_s
        if left_s <= 0 and not self._is_probing:
            return None
        when = "it is being tried again now" if self._is_probing else f"it is tried again in {left_s:.0f} s"
        return f"it failed {self._num_failures} times in a row ({self._why}) and is left alone; {when}"

    def starts(self) -> bool:
        """Count a request that goes out; return whether it is the probe, to be handed back with how it ended."""
        is_probe = self._opened_at_s is not None
        self._is_probing = self._is_probing or is_probe
        return is_probe

    def answered(self) -> bool:
        """Close: the endpoint is there, whatever it said, and whoever asked; return whether it was left alone."""
        was_open = self._opened_at_s is not None
        self._num_failures, self._opened_at_s, self._is_probing = 0, None, False
        return was_open

    def failed(self, why: str, now_s: float, *, is_probe: bool) -> bool:
        """Count a failure; return whether it is left alone from now on, and was not before.

        Late ones, of requests that went out before it opened, do not make the pause longer.
        """
        was_open = self._opened_at_s is not None
        self._num_failures += 1
        self._why = why
        if is_probe or (self._opened_at_s is None and self._num_failures >= self._max_failures):
            self._opened_at_s = now_s
        self.gave_up(is_probe=is_probe)
        return self._opened_at_s is not None and not was_open

    def gave_up(self, *, is_probe: bool) -> None:
        """Forget a request that was cancelled: it says nothing about the endpoint."""
        self._is_probing = self._is_probing and not is_probe
