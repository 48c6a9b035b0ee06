"""A metrics registry whose updates are atomic with respect to scrapes.

Scrapes run in a thread of their own. If a series were missing from a single scrape, because it was removed and not yet
set again, every alert on it would start anew.
"""

import contextlib
import threading
from collections.abc import Generator, Iterable

from prometheus_client import CollectorRegistry, Metric


class WholeRegistry(CollectorRegistry):
    """A registry that is collected only between changes."""

    def __init__(self) -> None:
        super().__init__()
        self._whole = threading.Lock()

    @contextlib.contextmanager
    def changing(self) -> Generator[None]:
        """Change series in the body. It must not await, because scrapes wait for its end."""
        with self._whole:
            yield

    def collect(self) -> Iterable[Metric]:
        """Return all metrics as they are before or after a change, never in between."""
        with self._whole:
            return list(super().collect())
