"""Shows a progress bar for an upload or download, if standard error is a terminal."""

import contextlib
import sys
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@contextlib.contextmanager
def progress(what: str) -> Generator[Callable[[int, int], None]]:
    """Show a progress bar named ``what``, and yield a function to call with the transferred and the total bytes.

    Nothing is shown if standard error is not a terminal.
    """
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
