"""How often a training rank may crash without getting further, and how long to wait before it is started again."""

from dataclasses import dataclass


@dataclass
class Restarts:
    """Counts crashes since a run last made progress, and says how long to wait before the next start.

    Args:
        max_without_progress: Restarts allowed without a new step.
        first_backoff_s: Pause before the first restart; doubles.
        last_backoff_s: Longest pause.
    """

    max_without_progress: int
    first_backoff_s: float
    last_backoff_s: float
    best_step: int = 0
    without_progress: int = 0
    total: int = 0

    def next_backoff_s(self, step: int, *, is_paused: bool = False) -> float | None:
        """Return the pause after a crash at ``step``, or None when it is time to give up.

        Only a step never reached before is progress: a run that falls back to its checkpoint and dies at the same
        place again makes none. One that is paused cannot make any: its crashes are not counted, and it is in no hurry.
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
