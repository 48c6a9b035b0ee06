"""Keeps the reason why this replica is not generating, as a sentence for the health checks and the OpenAI routes.

/readyz needs no key, so it shows only the phase: no model, path or number. The OpenAI routes need a key, so they also
give the details when they refuse a request.
"""

from typing import Protocol

from shared.lineage import NO_WEIGHTS, LineageVersion

_STARTING = "vLLM is being imported"


class VersionHolder(Protocol):
    """The properties of the weight receiver on which readiness depends."""

    @property
    def held_version(self) -> LineageVersion:
        """The policy version of the engine's weights; NO_WEIGHTS if it has no usable weights."""
        ...

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has released its GPU memory."""
        ...


class ServiceState:
    """Keeps the reason why the replica does not generate.

    run_follower.py writes it and the HTTP routes read it, on one event loop.

    Args:
        weights: Reports the policy version that is held.
    """

    def __init__(self, weights: VersionHolder) -> None:
        self._weights = weights
        self._phase: str | None = _STARTING
        self._detail = ""
        self.required_version = NO_WEIGHTS

    @property
    def is_starting(self) -> bool:
        """Whether vLLM is still being imported, so that this process cannot even wait for a run yet."""
        return self._phase == _STARTING

    def wait_for(self, phase: str, *, detail: str = "") -> None:
        """Set the reason why no run can be served yet. ``phase`` is shown without a key, ``detail`` only with one."""
        self._phase, self._detail = phase, detail

    def serve(self) -> None:
        """Clear the reason, because an engine serves the current run. Readiness now depends only on its weights."""
        self._phase, self._detail = None, ""

    def why_not_ready(self) -> str | None:
        """Return why the replica is not ready, without details, or None if it takes prompts.

        A replica whose decoding is paused for a push counts as ready.
        """
        if self._phase is not None:
            return self._phase
        if self._weights.is_asleep:
            return "asleep until the next weights"
        return None if self._weights.held_version.satisfies(self.required_version) else "waiting for weights"

    def why_policy_closed(self) -> str | None:
        """Return why the policy cannot answer requests, with details; None if it can, even with an outdated version."""
        if self._phase is not None:
            return f"{self._phase}: {self._detail}" if self._detail else self._phase
        if self._weights.held_version.policy_version < 0:
            required = max(0, self.required_version.policy_version)
            return f"waiting for weights: none received yet, policy version {required} is required"
        if self._weights.is_asleep:
            return "asleep until the next weights: the trainer uses its GPU memory"
        return None
