"""Detects an engine that no longer works although its processes live: it was stopped, or it hangs in a step.

An engine hangs if it holds requests, decoding is not paused for a push, and no step ends for ``hang_timeout_s``. Both
times are counted in polls, so time during which the machine was suspended does not count.
"""

from collections.abc import Sequence
from typing import Protocol

from shared.service.stopped_processes import Stops


class WatchedEngine(Protocol):
    """The part of an engine that is watched."""

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the engine's cores."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Number of requests in the engine."""
        ...

    @property
    def num_steps(self) -> int:
        """Number of steps that the engine has reported since its start."""
        ...


class EngineWatch:
    """Watches one engine after the other.

    Args:
        every_s: Seconds between two calls of ``look``.
        hang_timeout_s: Longest time that a step may take, in seconds.
    """

    def __init__(self, *, every_s: float, hang_timeout_s: float) -> None:
        self._every_s = every_s
        self._hang_timeout_s = hang_timeout_s
        self._stops = Stops(every_s=every_s)
        self._num_steps = 0
        self._silent_s = 0.0

    def look(self, engine: WatchedEngine, *, decoding_is_paused: bool) -> str | None:
        """Return why the engine must be replaced, or None if it works or has nothing to do."""
        if self._stops.look(engine.pids):
            return "vLLM's engine was stopped for a minute, for example by SIGSTOP, and generates nothing"
        has_work = engine.num_unfinished > 0 and not decoding_is_paused
        is_silent = has_work and engine.num_steps == self._num_steps
        self._num_steps = engine.num_steps
        self._silent_s = self._silent_s + self._every_s if is_silent else 0.0
        if self._silent_s <= self._hang_timeout_s:
            return None
        return (
            f"vLLM's engine hangs: {engine.num_unfinished} requests are in it, and no step has ended for "
            f"{self._hang_timeout_s:g} s. If its steps may take longer, set HEADRACE_ENGINE_HANG_TIMEOUT_S"
        )
