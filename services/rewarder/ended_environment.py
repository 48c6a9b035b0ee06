"""Stands in for a rollout's TRL environment, in the argument ``environments`` of reward functions.

    [env.reward for env in environments]      public attributes can be read, with the values that JSON can express
    env.client, env.guess("apple")            other attributes and all methods raise AttributeError, with the reason

When rewards are computed, the rollout has ended. Its environment was a process of the sessions service.
"""

from typing import Any

from shared.messages import PlayedEnvironment


class EndedEnvironment:
    """Gives reward functions the public attributes that an environment had when its rollout ended."""

    def __init__(self, played: PlayedEnvironment) -> None:
        self.__dict__.update(played.attributes)
        self._played = played

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError with the reason. Python calls this only for attributes that are missing."""
        if name.startswith("__"):  # Python itself asks for these, also before there is a self._played
            raise AttributeError(name)
        played = self._played
        there = ", ".join(played.attributes) or "none"
        why = played.left_out.get(name) or (
            f"reward functions get the public attributes at the rollout's end, and no methods; these are: {there}"
        )
        raise AttributeError(f"the environment {played.name} has no attribute {name!r} here: {why}")

    def __repr__(self) -> str:
        """Return the environment's type, such as ``module:Class``, and its attributes."""
        return f"<{self._played.name} {self._played.attributes}>"
