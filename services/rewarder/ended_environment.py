"""The stand-in for a TRL environment that reward functions get in ``environments`` after the rollout has ended.

    [env.reward for env in environments]      its public attributes are there, as JSON can express them
    env.client, env.guess("apple")            AttributeError, with the reason

The environment itself was a process of the sessions service, which plays agent runs.
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
        """Return the name of the environment's class, and its attributes."""
        return f"<{self._played.name} {self._played.attributes}>"
