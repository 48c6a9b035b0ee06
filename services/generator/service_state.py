"""Why this replica is not generating, in words.

/readyz answers anybody, so it says the phase alone: no model, no path, no number. Who has a key gets the details too,
when an OpenAI route refuses.
"""

from typing import Protocol

from shared.lineage import NO_WEIGHTS, LineageVersion

_STARTING = "vLLM is being imported"


class VersionHolder(Protocol):
    """The part of the weight receiver that readiness needs."""

    @property
    def held(self) -> LineageVersion:
        """Version held."""
        ...

    @property
    def is_asleep(self) -> bool:
        """Whether the engine's memory is given away."""
        ...


class ServiceState:
    """Written by run_follower.py, read by the HTTP routes, all on one event loop.

    Args:
        weights: Says which policy version is held.
    """

    def __init__(self, weights: VersionHolder) -> None:
        self._weights = weights
        self._phase: str | None = _STARTING
        self._detail = ""
        self.required_version = NO_WEIGHTS

    @property
    def is_starting(self) -> bool:
        """Whether this process is not even able to wait for a run yet."""
        return self._phase == _STARTING

    def wait_for(self, phase: str, *, detail: str = "") -> None:
        """Note what generation waits for before it can serve a run. ``phase`` is public, ``detail`` is not."""
        self._phase, self._detail = phase, detail

    def serve(self) -> None:
        """Note that an engine serves the current run; from now on only weights can be missing."""
        self._phase, self._detail = None, ""

    def why_not_ready(self) -> str | None:
        """Return the phase while no prompts are taken, None if they are. A hold during a push does not count."""
        if self._phase is not None:
            return self._phase
        if self._weights.is_asleep:
            return "asleep until the next weights"
        return None if self._weights.held.satisfies(self.required_version) else "waiting for weights"

    def why_policy_closed(self) -> str | None:
        """Return why the policy cannot answer requests, with details; one that lags behind can."""
        if self._phase is not None:
            return f"{self._phase}: {self._detail}" if self._detail else self._phase
        if self._weights.held.policy_version < 0:
            required = max(0, self.required_version.policy_version)
            return f"waiting for weights: none received yet, policy version {required} is required"
        if self._weights.is_asleep:
            return "asleep until the next weights: the trainer has its GPU memory"
        return None
