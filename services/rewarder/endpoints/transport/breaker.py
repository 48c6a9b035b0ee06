"""A circuit breaker: stops calls to an endpoint that keeps failing, and tests from time to time whether it is back.

    closed --failures in a row--> open --pause--> half-open: one request is let through
       ^                           ^                 |        |
       +----------- it answered ---|-----------------+        |
                                   +-------- it failed -------+

Without a breaker, every group of a run would wait until the deadline when an endpoint is down. The endpoint would then
get all these requests at once when it comes back.
"""

from typing import Literal

_FORGOTTEN_S = 900.0
State = Literal["closed", "half-open", "open"]


class Breaker:
    """The circuit breaker of one endpoint. ``now_s`` in its methods is a monotonic clock in seconds.

    Args:
        max_failures: Failures in a row that open it.
        pause_s: Seconds from opening until one request is let through.
    """

    def __init__(self, *, max_failures: int, pause_s: float) -> None:
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._num_failures = 0
        self._opened_at_s: float | None = None
        self._is_probing = False
        self._why = ""

    def state(self, now_s: float) -> State:
        """Return the current state. It is half-open while a probe is under way.

        A probe is the one request that tests whether the endpoint is back. If no probe has begun 15 minutes after the
        pause, the state counts as closed, because there may never be another request.
        """
        if self._opened_at_s is None:
            return "closed"
        if self._is_probing:
            return "half-open"
        return "open" if now_s < self._opened_at_s + self._pause_s + _FORGOTTEN_S else "closed"

    def why_not(self, now_s: float) -> str | None:
        """Return the reason why no request may be sent now, or None if a request may be sent."""
        if self._opened_at_s is None:
            return None
        left_s = self._opened_at_s + self._pause_s - now_s
        if left_s <= 0 and not self._is_probing:
            return None
        when = "it is being tried again now" if self._is_probing else f"it is tried again in {left_s:.0f} s"
        return f"it failed {self._num_failures} times in a row ({self._why}) and is not called now; {when}"

    def starts(self) -> bool:
        """Record that a request is sent. Return whether it is the probe: ``failed`` and ``gave_up`` need to know."""
        is_probe = self._opened_at_s is not None
        self._is_probing = self._is_probing or is_probe
        return is_probe

    def answered(self) -> bool:
        """Close the breaker, because the endpoint answered. Return whether the breaker was open.

        Any answer to any request counts, whatever its content.
        """
        was_open = self._opened_at_s is not None
        self._num_failures, self._opened_at_s, self._is_probing = 0, None, False
        return was_open

    def failed(self, why: str, now_s: float, *, is_probe: bool) -> bool:
        """Count a failure of the endpoint. Return whether it opened the breaker, which was closed before.

        Failures of requests that were sent before the breaker opened do not make the pause longer.
        """
        was_open = self._opened_at_s is not None
        self._num_failures += 1
        self._why = why
        if is_probe or (self._opened_at_s is None and self._num_failures >= self._max_failures):
            self._opened_at_s = now_s
        self.gave_up(is_probe=is_probe)
        return self._opened_at_s is not None and not was_open

    def gave_up(self, *, is_probe: bool) -> None:
        """Record that a request ended without a result, such as a cancelled one. It says nothing about the endpoint."""
        self._is_probing = self._is_probing and not is_probe
