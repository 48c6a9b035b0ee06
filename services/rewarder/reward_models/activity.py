"""The current work of a reward model's process, and the time when that work has taken too long."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Activity:
    """Work on some calls, or on no call while the model is being loaded.

    Args:
        ids: The calls' ids.
        limit_s: Longest time for this work, in seconds.
        ends_at: End of that time, by the monotonic clock in seconds.
    """

    ids: frozenset[int]
    limit_s: float
    ends_at: float

    @classmethod
    def begun(cls, limit_s: float, ids: Iterable[int] = ()) -> Self:
        """Return work that begins now and may take ``limit_s`` seconds."""
        return cls(frozenset(ids), limit_s, time.monotonic() + limit_s)

    def left_s(self) -> float:
        """Return the seconds left until the limit."""
        return max(0.0, self.ends_at - time.monotonic())
