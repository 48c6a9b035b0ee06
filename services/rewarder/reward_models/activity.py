"""What the process of a reward model is at, and when that has taken too long."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Activity:
    """Work on these calls, on none of them while the model is loaded; ``ends_at`` is by the monotonic clock."""

    ids: frozenset[int]
    limit_s: float
    ends_at: float

    @classmethod
    def begun(cls, limit_s: float, ids: Iterable[int] = ()) -> Self:
        """Return what begins now and may take ``limit_s``."""
        return cls(frozenset(ids), limit_s, time.monotonic() + limit_s)

    def left_s(self) -> float:
        """Return how long it may still take."""
        return max(0.0, self.ends_at - time.monotonic())
