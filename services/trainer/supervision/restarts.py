"""Limits how often a training rank may crash without progress, and how long to wait before each restart."""

from dataclasses import dataclass


@dataclass
class Restarts:
    """Counts crashes since a run's last progress, and computes the pause before the next start.

    Args:
        max_without_progress: Maximum number of restarts without a new step.
        first_backoff_s: Pause before the first restart, in seconds; doubles with each further one.
        last_backoff_s: Longest pause in seconds.
    """

    max_without_progress: int
    first_backoff_s: float
    last_backoff_s: float
    best_step: int = 0
    without_progress: int = 0
    total: int = 0

    def next_backoff_s(self, step: int, *, is_paused: bool = False) -> float | None:
        """Return the pause in seconds after a crash at ``step``, or None to give up.

        Only a step that was never reached before counts as progress: a run that resumes from its checkpoint and dies at
        the same place makes none. A paused run cannot make progress: its crashes do not count, and it waits longest.
        """
        if step > self.best_step:
            self.best_step, self.without_progress = step, 0
        if is_paused:
            self.total += 1
            return self.last_backoff_s
        self.without_progress += 1
        if self.without_progress > self.max_without_progress:
            return None
        self.total += 1
        return min(self.first_backoff_s * 2.0 ** (self.without_progress - 1), self.last_backoff_s)
