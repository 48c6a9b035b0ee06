"""Shows on a terminal how far an upload or download is."""

import contextlib
import sys
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@contextlib.contextmanager
def progress(what: str) -> Generator[Callable[[int, int], None]]:
    """Yield a function that shows how far a transfer is, on a terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True, emoji=False),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
