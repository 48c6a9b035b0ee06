"""Why this replica is not generating, in words: what /readyz answers and what the OpenAI routes refuse with."""

from typing import Protocol


class VersionHolder(Protocol):
    """The part of the weight receiver that readiness needs."""

    @property
    def policy_version(self) -> int:
        """Version held; -1 is none of this run's."""
        ...


class ServiceState:
    """Written by run_follower.py, read by the HTTP routes, all on one event loop.

    Args:
        weights: Says which policy version is held.
    """

    def __init__(self, weights: VersionHolder) -> None:
        self._weights = weights
        self._phase: str | None = "vLLM is being imported"
        self.required_version = -1

    def wait_for(self, reason: str) -> None:
        """Note what generation waits for before it can serve a run."""
        self._phase = reason

    def serve(self) -> None:
        """Note that an engine serves the current run; from now on only weights can be missing."""
        self._phase = None

    def why_not_ready(self) -> str | None:
        """Return why no prompts are taken, or None if they are. A hold during a push does not count."""
        if self._phase is not None:
            return self._phase
        required, held = max(0, self.required_version), self._weights.policy_version
        if held < 0:
            return f"waiting for weights: none received yet, policy version {required} is required"
        if held < required:
            return f"waiting for weights: holds policy version {held}, {required} is required"
        return None

    def why_policy_closed(self) -> str | None:
        """Return why the policy cannot answer requests; one that lags behind can."""
        reason = self.why_not_ready()
        return reason if self._phase is not None or self._weights.policy_version < 0 else None
