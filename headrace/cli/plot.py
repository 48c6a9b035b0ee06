"""`headrace plot`: draws chosen metrics of one run or several, in the terminal or as an image."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from headrace import terminal
from headrace.cli.run_source import opened
from headrace.watch.run_plot import draw_image, drawn, labels_of, metrics_to_draw
from headrace.watch.run_watch import RunWatch
from headrace.watch.watch import take_all
from headrace.watch.watch_view import MAX_WIDTH
from shared.errors import UserError


def picture_at_end(watch: RunWatch) -> Path | None:
    """Draw a run's metrics into curves.png in its directory, and return the file's path.

    Return None if matplotlib is not installed, no step was trained, or the directory is not on this machine or cannot
    be written.
    """
    path = Path(str(watch.run["run_dir"])) / "curves.png"
    if not (watch.by_step and os.path.isdir(path.parent) and importlib.util.find_spec("matplotlib")):
        return None
    labelled = labels_of([watch])
    try:
        draw_image(labelled, metrics_to_draw(labelled, []), path)
    except UserError:
        return None
    return path


def plot(arguments: argparse.Namespace) -> int:
    """Draw metrics of the named runs in the terminal, or write them to the image file of ``--to``."""
    found: dict[str, RunWatch] = {}
    for given in arguments.runs or [None]:
        with opened(arguments, given) as (runs, run_id):
            if run_id not in found:
                found[run_id] = RunWatch(runs.get(run_id))
                take_all(found[run_id], runs)
    labelled = labels_of([*found.values()])
    metrics = metrics_to_draw(labelled, arguments.metric)
    if arguments.to is not None:
        path = Path(arguments.to)
        draw_image(labelled, metrics, path)
        sys.stdout.write(f"wrote {path}\n")
        return 0
    console = terminal.console(pipe_width=MAX_WIDTH)
    console.print(drawn(labelled, metrics, width=min(console.width, MAX_WIDTH)))
    return 0
