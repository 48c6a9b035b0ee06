"""A registry of metrics of which no scrape sees half a change.

Scrapes come in a thread of their own. A series that is missing from a single one, because it was taken away a moment
ago and not yet set again, would set every alert on it back to its start.
"""

import contextlib
import threading
from collections.abc import Generator, Iterable

from prometheus_client import CollectorRegistry, Metric


class WholeRegistry(CollectorRegistry):
    """Collects between changes."""

    def __init__(self) -> None:
        super().__init__()
        self._whole = threading.Lock()

    @contextlib.contextmanager
    def changing(self) -> Generator[None]:
        """Change series in the body, which awaits nothing: scrapes wait for its end."""
        with self._whole:
            yield

    def collect(self) -> Iterable[Metric]:
        """Return all metrics as they were before a change, or are after it."""
        with self._whole:
            return list(super().collect())
