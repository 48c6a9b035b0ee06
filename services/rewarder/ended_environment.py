"""Stands in for an environment of TRL, whose rollout has ended, among the arguments of reward functions.

    [env.reward for env in environments]      its public attributes are there, as JSON can express them
    env.client, env.guess("apple")            AttributeError, with the reason

The environment itself was a process of the sessions service.
"""

from typing import Any

from shared.messages import PlayedEnvironment


class EndedEnvironment:
    """The public attributes of an environment at its rollout's end."""

    def __init__(self, played: PlayedEnvironment) -> None:
        self.__dict__.update(played.attributes)
        self._played = played

    def __getattr__(self, name: str) -> Any:
        """Say why an attribute is missing. Python calls this only for such attributes."""
        if name.startswith("__"):  # Python itself asks for these, also before there is a self._played
            raise AttributeError(name)
        played = self._played
        there = ", ".join(played.attributes) or "none"
        why = played.left_out.get(name) or (
            f"reward functions get the public attributes at the rollout's end, and no methods; these are: {there}"
        )
        raise AttributeError(f"the environment {played.name} has no attribute {name!r} here: {why}")

    def __repr__(self) -> str:
        """Return the class and the attributes."""
        return f"<{self._played.name} {self._played.attributes}>"
