"""Formats a list of runs for a message, with one line and the complete id for each run."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any


def run_lines(runs: Sequence[Mapping[str, Any]], *, numbered: bool = False) -> str:
    """Return one line per run with its id, name, status and local start time or, before that, time of submission.

    Args:
        runs: Runs, or candidates of an ambiguous name, as the API sends them.
        numbered: Whether each line begins with a number, from 1 on.
    """
    rows: list[list[str]] = []
    for number, run in enumerate(runs, start=1):
        started_at_s = run.get("started_at_s")
        since = ("submitted", run.get("created_at_s")) if started_at_s is None else ("started", started_at_s)
        rows.append(
            [
                *([str(number)] if numbered else []),
                str(run["run_id"]),
                str(run.get("name") or "-"),
                str(run["status"]),
                f"{since[0]} {local_time(since[1])}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def local_time(seconds: Any) -> str:
    """Return a time in Unix seconds as local date and time to the minute; a dash if there is none."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(float(seconds)).astimezone().strftime("%Y-%m-%d %H:%M")
