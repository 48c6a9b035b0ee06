"""The reward function of the benchmark, for the real rewarder."""

from typing import Any


def branch(completions: list[Any], **columns: Any) -> list[float]:
    """Return a different score for each completion of a group."""
    del columns
    return [float(number) for number in range(len(completions))]
